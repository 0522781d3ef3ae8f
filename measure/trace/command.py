"""`python -m measure trace MODEL`: the flags of `train`, answered by running the real step in a child process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from calc.breakdown import to_csv
from calc.catalogue import load_config
from calc.cli import FORMATS, Parser, add_plan_flags, aligned, markdown
from calc.commands import Command, flag
from calc.errors import InputError, validated
from calc.training.plan import TrainingPlan
from calc.units import show_bytes
from measure.trace.options import TraceOptions

_SHARED = (
    "seq",
    "micro_batch",
    "recipe",
    "optimizer",
    "optimizer_kernel",
    "recompute",
    "attention",
    "dropout",
    "method",
    "lora_rank",
)
# What a trace runs, where a prediction knows more. A flag that is not here must keep its default.
_TRACED: Mapping[str, tuple[Any, ...]] = {
    "recipe": ("pure-bf16", "amp", "fp32"),
    "optimizer": ("adamw", "sgd", "momentum", "adafactor"),
    "recompute": ("none", "full"),
    "attention": ("sdpa", "eager"),
    "method": ("full", "lora", "dora"),
    "objective": ("pretrain", "sft"),
}
_FREE = ("seq", "micro_batch", "global_batch", "optimizer_kernel", "dropout", "lora_rank", "lora_targets")
_FLAGS = Command("trace", "", "calc.training.plan", "TrainingPlan", "")  # whose plan gives the flags
_COLUMNS = ("path", "value", "unit", "source")


def main(argv: Sequence[str]) -> str:
    """The answer as text. InputError on bad input, on what a trace cannot run, and when it takes longer than --seconds."""
    given = vars(_parser().parse_args(argv))
    if given["format"] not in FORMATS:
        raise InputError.of("--format", given["format"], f"it must be one of {', '.join(FORMATS)}")
    options = _options(given)
    answer = observe(load_config(given["MODEL"]), options, _seconds(given["seconds"]))
    if given["ledger"]:
        return ledger(answer, options)
    return _formatted(answer, given["format"])


def observe(config: Mapping[str, Any], options: TraceOptions, seconds: float) -> dict[str, Any]:
    """Trace in a child process that ends with this one and within `seconds`. Its progress goes to standard error."""
    request = json.dumps({"config": config, "options": asdict(options)})
    command = [sys.executable, "-m", "measure.trace"]
    ended = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the child below is killed too
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
    ) as child:
        try:
            output, _ = child.communicate(request, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise InputError.of(
                "--seconds", seconds, "the trace took longer and was stopped; allow more, or shorten --seq"
            ) from None
        finally:
            child.kill()
            signal.signal(signal.SIGTERM, ended)
    if child.returncode != 0 or not output:
        raise InputError(f"the trace ended with status {child.returncode} and no answer (out of memory?)")
    answer: dict[str, Any] = json.loads(output)
    if "error" in answer:
        raise InputError(answer["error"], answer["field"])
    return answer


def _environment() -> dict[str, str]:
    """No network, no downloads, no stray threads: the child builds from the config alone."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _parser() -> Parser:
    parser = Parser(
        prog="python -m measure trace", description="Memory of a training step, observed.", allow_abbrev=False
    )
    parser.add_argument(
        "MODEL", help="a catalogue name, a path to a config.json or its folder, or - for standard input"
    )
    add_plan_flags(parser, _FLAGS)
    parser.add_argument(
        "--layers",
        default="auto",
        metavar="auto|all|N",
        help="decoder layers really run; the rest is extended from them",
    )
    parser.add_argument(
        "--rounding", default="512", help="bytes that each storage is rounded up to, as the allocator does (1: none)"
    )
    parser.add_argument("--seconds", default="120", help="stop the trace after this long")
    parser.add_argument(
        "--ledger", action="store_true", help="print what each layer keeps for backward, operation by operation"
    )
    parser.add_argument("--format", default="table", metavar="|".join(FORMATS), help="how to print (default: table)")
    return parser


def _options(given: Mapping[str, Any]) -> TraceOptions:
    values = {key: given[key] for key in TrainingPlan.model_fields if key in given}
    targets = tuple(filter(None, values.pop("lora_targets", "").split(",")))
    dora = values.get("method") == "dora"
    if dora:
        values["method"] = "lora"  # the same rules hold
    plan = validated(TrainingPlan, values, flag)
    _refuse(plan)
    shared = {
        name: getattr(plan, name) for name in _SHARED if name in values
    }  # what was not given keeps the trace's default
    return TraceOptions(
        **{**shared, **({"method": "dora"} if dora else {})},
        accumulation=plan.microbatches,
        lora_targets=targets,
        rounding=_count("rounding", given["rounding"], 1, 2**21),
        layers=_layers(given["layers"]),
    )


def _refuse(plan: TrainingPlan) -> None:
    """InputError for the first flag that asks for what a trace does not run."""
    for name, field in TrainingPlan.model_fields.items():
        value = getattr(plan, name)
        allowed = _TRACED.get(name, (field.default,))
        if name not in _FREE and value not in allowed:
            raise InputError.of(flag(name), value, f"a trace runs {', '.join(map(str, allowed))} only")


def _layers(text: str) -> int | None:
    named = {"auto": None, "all": 0}
    return named[text] if text in named else _count("layers", text, 1, 4096)


def _count(name: str, text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise InputError.of(flag(name), text, f"it must be a whole number from {low} to {high}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise InputError.of("--seconds", text, "it must be a number above 0, at most 86400")
    return seconds


def _formatted(answer: Mapping[str, Any], form: str) -> str:
    if form == "json":
        return json.dumps(answer, indent=1)
    rows = answer["components"]
    if form == "csv":
        return to_csv(rows, _COLUMNS).rstrip("\n")
    summary = [(key, f"{value:,}") if isinstance(value, int) else (key, str(value)) for key, value in _scalars(answer)]
    parts = [(row["path"], f"{row['value']:,}", show_bytes(row["value"])) for row in rows]
    if form == "markdown":
        return "\n\n".join([markdown(("quantity", "bytes"), summary), markdown(("path", "bytes", ""), parts)])
    return "\n\n".join(
        [aligned(summary), aligned(parts), "\n".join(f"assumption: {text}" for text in answer["assumptions"])]
    )


def _scalars(answer: Mapping[str, Any]) -> list[tuple[str, Any]]:
    phases = [(f"phases.{name}", value) for name, value in answer["phases"].items()]
    return [*((key, value) for key, value in answer.items() if isinstance(value, int | str)), *phases]


def ledger(answer: Mapping[str, Any], options: TraceOptions) -> str:
    """The ledger as text: per layer, each kept storage with the operation that keeps it, in bytes and in bytes a token."""
    tokens = options.seq * options.micro_batch
    lines = []
    for layer in dict.fromkeys(row["layer"] for row in answer["saved"]):
        rows = [row for row in answer["saved"] if row["layer"] == layer]
        total = sum(row["nbytes"] for row in rows)
        where = "outside the layers" if layer is None else f"layer {layer} (stands for {rows[0]['count']})"
        lines.append(f"{where}: {total:,} bytes ({show_bytes(total)}), {total / tokens:,.2f} bytes a token")
        for row in rows:
            shape = "×".join(map(str, row["shape"])) or "scalar"
            keeper = f"{row['module'] or '(model)'} {row['op']}"
            cells = f"{keeper:<56} {row['dtype']:<9} {shape:<20} {row['nbytes']:>15,} {row['nbytes'] / tokens:>12,.2f}"
            lines.append(f"  {cells}  made by {row['made_by']}")
    return "\n".join(lines)
