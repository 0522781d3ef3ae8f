"""`python -m measure trace MODEL`: the flags of `train`, answered by running the real step in a child process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calc.breakdown import Breakdown, Component
from calc.catalogue import load_config
from calc.cli import Parser, add_format, add_gpu_flags, add_plan_flags, chosen_format, formatted
from calc.commands import Command, flag
from calc.errors import InputError, validated
from calc.hardware import Gpu, chosen_gpu
from calc.training.overhead import SOURCES, overhead
from calc.training.plan import TrainingPlan
from calc.units import show_bytes
from measure.trace.child import observe
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
    "dp",
    "zero",
    "reshard_after_forward",
)
# What a trace runs, where a prediction knows more. A flag that is not here must keep its default.
_TRACED: Mapping[str, tuple[Any, ...]] = {
    "recipe": ("pure-bf16", "amp", "fp32", "fsdp-bf16"),
    "zero": (0, 1, 3),
    "reshard_after_forward": (True, False),
    "optimizer": ("adamw", "sgd", "momentum", "adafactor"),
    "recompute": ("none", "full"),
    "attention": ("sdpa", "eager"),
    "method": ("full", "lora", "dora"),
    "objective": ("pretrain", "sft"),
}
_FREE = (
    "context_mib",
    "nccl_mib",
    "workspace_mib",
    "fragmentation_percent",
    "seq",
    "micro_batch",
    "global_batch",
    "optimizer_kernel",
    "dropout",
    "lora_rank",
    "lora_targets",
    "dp",
)
_FLAGS = Command("trace", "", "calc.training.plan", "TrainingPlan", "")  # whose plan gives the flags


@dataclass(frozen=True, slots=True)
class Observed:
    """The JSON of a trace, as an answer that the command line can print in every format."""

    data: dict[str, Any]

    @property
    def breakdown(self) -> Breakdown:
        """The peak instant, one leaf a component."""
        return Breakdown(
            Component("", children=tuple(Component(row["path"], row["value"]) for row in self.data["components"])),
            "bytes",
        )

    def as_json(self) -> dict[str, Any]:
        return self.data


def main(argv: Sequence[str]) -> str:
    """The answer as text. InputError on bad input, on what a trace cannot run, and when it takes longer than --seconds."""
    given = vars(_parser().parse_args(argv))
    form = chosen_format(given)
    plan = _plan(given)
    options = _options(plan, given)
    gpu = chosen_gpu(given["gpu"], given["gpu_memory_gib"], given["gpu_tflops"], given["gpu_GBps"], flag)
    observed = observe(load_config(given["MODEL"]), options, _seconds(given["seconds"]))
    if given["ledger"]:
        return ledger(observed, options)
    return formatted(Observed(_completed(observed, plan, gpu)), form)


def _completed(observed: Mapping[str, Any], plan: TrainingPlan, gpu: Gpu | None) -> dict[str, Any]:
    """What was observed, with what no tensor shows put on top by the same rules as for a prediction."""
    peak = observed["peak_bytes"]
    lines = overhead(plan, gpu, peak)
    reserved = peak + lines.workspace + lines.fragmentation
    driver = reserved + lines.context + lines.nccl
    memory = gpu.memory_bytes if gpu else None
    states = ("peak_bytes", "peak_phase", "parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
    stage = {"stage": 0, "layers": observed["layers"], "in_flight": 1, **{key: observed[key] for key in states}}
    return {
        **{key: value for key, value in observed.items() if key not in ("saved", "components", "assumptions")},
        "overhead_bytes": lines._asdict(),
        "reserved_bytes": reserved,
        "driver_bytes": driver,
        "gpu_memory_bytes": memory,
        "fits": None if memory is None else driver <= memory,
        "headroom_bytes": None if memory is None else memory - driver,
        "gpus": plan.gpus,
        "stages": [stage],
        "saved": observed["saved"],
        "components": observed["components"],
        "assumptions": [*observed["assumptions"], *(f"not observed: {source}" for source in SOURCES.values())],
    }


def _parser() -> Parser:
    parser = Parser(
        prog="python -m measure trace", description="Memory of a training step, observed.", allow_abbrev=False
    )
    parser.add_argument(
        "MODEL", help="a catalogue name, a path to a config.json or its folder, or - for standard input"
    )
    add_gpu_flags(parser)
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
    add_format(parser)
    return parser


def _plan(given: Mapping[str, Any]) -> TrainingPlan:
    """The plan that the flags describe, by the rules of a prediction. InputError when a trace does not run it."""
    values = {key: given[key] for key in TrainingPlan.model_fields if key in given}
    if values.get("method") == "dora":  # which no ledger knows yet; the rules are those of LoRA
        values["method"] = "lora"
    plan = validated(TrainingPlan, values, flag)
    _refuse(plan)
    return plan


def _options(plan: TrainingPlan, given: Mapping[str, Any]) -> TraceOptions:
    shared = {name: getattr(plan, name) for name in _SHARED if name in given}  # the rest keeps the trace's own defaults
    if given.get("method") == "dora":
        shared["method"] = "dora"
    return TraceOptions(
        **shared,
        accumulation=plan.microbatches,
        lora_targets=plan.lora_targets,
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
    if plan.recipe == "fsdp-bf16" and plan.zero != 3:
        raise InputError.of(flag("recipe"), plan.recipe, "a trace runs it with --zero 3 only, whose shards it casts")


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
