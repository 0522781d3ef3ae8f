"""The parts of README.md and docs/ that the product prints: `make docs` writes them anew, tests/test_docs.py holds them equal.

Two kinds are written: what stands between `<!-- name -->` and `<!-- end -->`, by the function of that name in `BLOCKS`; and the output
below a command in a fenced block of `console` (`$ plumbline ...`) or `pycon` (`>>> ...`).
"""

from __future__ import annotations

import argparse
import doctest
import io
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import calc.cli
import measure.cli
from calc.command_line.flags import Parser
from tests.published import serving_speed, training_memory, training_throughput, vllm_memory

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"(<!-- (?!end)(?P<name>[a-z ]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_MARKS = (">>>", *("...",) * 20)
_SHELL = re.compile(r"(?P<fence>```console\n)(?P<body>.*?)(?=```)", re.DOTALL)
_PYTHON = re.compile(r"(?P<fence>```pycon\n)(?P<body>.*?)(?=```)", re.DOTALL)


def written(text: str) -> str:
    """A page with everything that is printed by the product as it is printed today."""
    text = _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found['name']]().strip()}\n", text)
    text = _SHELL.sub(lambda found: found["fence"] + _session(found["body"]), text)
    return _PYTHON.sub(lambda found: found["fence"] + _interpreter(found["body"]), text)


def answered(line: str) -> str:
    """What a line such as `plumbline params gpt2 | grep -E 'total|active'` prints."""
    command, _, pattern = line.partition(" | grep -E ")
    program, *words = shlex.split(command)
    assert program == "plumbline"
    printed = calc.cli.run(words)
    wanted = re.compile(shlex.split(pattern)[0] if pattern else "")
    return "".join(f"{each}\n" for each in printed.splitlines() if wanted.search(each))


def _session(body: str) -> str:
    commands = [line for line in body.splitlines() if line.startswith("$ ")]
    return "".join(f"{line}\n{answered(line.removeprefix('$ '))}" for line in commands)


def _interpreter(body: str) -> str:
    names: dict[str, Any] = {}
    made = ""
    for example in doctest.DocTestParser().get_examples(body):
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(example.source, "README.md", "single"), names)
        made += "".join(f"{mark} {line}\n" for mark, line in zip(_MARKS, example.source.splitlines(), strict=False))
        made += printed.getvalue()
    return made


# --- the command line


def helped() -> Iterator[tuple[str, argparse.ArgumentParser | str]]:
    """Each command, with its parser, taken where it would print its help, or the text that it prints without one."""
    for program, run in (("plumbline", calc.cli.run), ("plumbline measure", measure.cli.run)):
        for line in run([]).splitlines()[2:]:
            words = line.strip().split("  ")[0].split()
            found: list[argparse.ArgumentParser] = []
            taken = patch.object(Parser, "print_help", autospec=True, side_effect=lambda own, to=found: to.append(own))
            with taken, redirect_stdout(io.StringIO()) as printed:
                try:
                    text = run([*words, "--help"])
                except SystemExit:
                    text = printed.getvalue()
            yield f"{program} {' '.join(words)}", found[0] if found else text


def command_line() -> str:
    """Every command with its flags: a table a command."""
    made = []
    for name, found in helped():
        made += [f"## {name}", ""]
        if isinstance(found, str):
            made += ["```text", _as_plumbline(found.strip()), "```", ""]
            continue
        arguments = [action for action in found._actions if "--help" not in action.option_strings]
        given = " ".join(str(action.metavar or action.dest) for action in arguments if not action.option_strings)
        made += [_sentence(found.description or ""), "", f"    {name} {given}".rstrip(), ""]
        made += ["| flag | value | meaning |", "|---|---|---|", *map(_row, arguments), ""]
    return "\n".join(made)


def _as_plumbline(text: str) -> str:
    return text.replace("python -m calc", "plumbline").replace("python -m measure", "plumbline measure")


def _row(action: argparse.Action) -> str:
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
    value = "" if action.nargs == 0 or not action.option_strings else _value(action)
    help_text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return f"| {flags} | {value} | {_cell(_as_plumbline(help_text))} |"


def _value(action: argparse.Action) -> str:
    shown = str(action.metavar or action.dest)
    return ", ".join(f"`{one}`" for one in shown.split("|")) if "|" in shown else _cell(shown)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


# --- accuracy


def training_rows() -> str:
    """Every published training run with its error, or why it is not predicted."""
    lines = [
        "| program | counter | run | source | measured | error | cause, or why it is not predicted |",
        "|" + "---|" * 7,
    ]
    for row in training_memory.ROWS:
        measured = f"{row['measured']} {row['unit']}" if row["measured"] else "out of memory"
        error = f"{row['error_percent']:+.1f} %" if "error_percent" in row else ""
        reason = row.get("why") or row.get("not_predicted", "")
        cells = (
            row["program"],
            training_memory.counter_of(row),
            row["id"],
            f"[source]({row['source']})",
            measured,
            error,
        )
        lines.append("| " + " | ".join(map(_cell, (*cells, reason))) + " |")
    return "\n".join(lines)


def training_summary() -> str:
    rows = training_memory.ROWS
    return f"{len(rows)} published measurements are on record: {training_memory.summary()}."


def serving_table() -> str:
    """Serving speed by engine, without and with the runs' options, and by model, GPU and weights: median and 90th percentile of the
    absolute error, and the signed median."""
    groups: dict[str, list[serving_speed.Errors]] = defaultdict(list)
    for each in serving_speed.errors(serving_speed.rows()):
        row = each.row
        for name in ("all", row["engine"], " ".join(row[key] for key in ("engine", "model", "gpu", "precision"))):
            groups[name].append(each)
    for each in serving_speed.errors(serving_speed.rows(), recipes=False):
        groups[f"{each.row['engine']}, defaults"].append(each)
    columns = serving_speed._COLUMNS
    head = [" ".join((what, by)) for what in ("TPOT:", "TTFT:") for by in ("Plumbline", "aiconfigurator", "roofline")]
    lines = [f"| runs | rows | {' | '.join(head)} |", "|" + "---|" * (2 + len(head))]
    for name in sorted(groups, key=lambda name: (name != "all", " " in name, name)):
        found = groups[name]
        cells = [serving_speed.spread(v for each in found if (v := get(each)) is not None) for _, get in columns]
        lines.append(f"| {name} | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def time_table() -> str:
    """Training throughput by source, and for dense models and models with experts."""
    good = training_throughput.compared(training_throughput.cases())
    groups: dict[str, list[training_throughput.Case]] = defaultdict(list)
    for case in good:
        groups[training_throughput.family(case)].append(case)
        groups["with experts, all" if case.experts else "dense, all"].append(case)
    lines = ["| runs | rows | mean error | median | 90 % within |", "|---|---|---|---|---|"]
    for name in sorted(groups, key=lambda name: (name.endswith(", all"), name)):
        errors = [100 * case.error() for case in groups[name]]
        sizes = [abs(error) for error in errors]
        far = training_throughput.percentile(sizes, 0.9)
        lines.append(
            f"| {name} | {len(errors)} | {sum(errors) / len(errors):+.1f} % | {median(sizes):.1f} % | {far:.1f} % |"
        )
    right = [ok for *_, ok in training_throughput.pairs(good)]
    return "\n".join([*lines, "", f"Pairs of layouts ranked as they were measured: {sum(right)} of {len(right)}."])


def vllm_table() -> str:
    """vLLM's own figures of its memory against those computed for the same plan, by version: median error / largest (how many)."""
    lines = [f"| version | {' | '.join(vllm_memory.KEYS)} |", "|" + "---|" * (1 + len(vllm_memory.KEYS))]
    for version in (None, *vllm_memory.versions()):
        found = [vllm_memory.errors(key, version) for key in vllm_memory.KEYS]
        cells = [f"{100 * median(e):.1f} / {100 * e[-1]:.1f} % ({len(e)})" if e else "" for e in found]
        lines.append(f"| {version or 'all'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def three_ways() -> str:
    """The ways of checking, and what they showed."""
    memory = training_memory.errors_of(
        row for row in training_memory.ROWS if row["confidence"] == "high" and row["measured"]
    )
    good = training_throughput.compared(training_throughput.cases())
    dense, experts = (
        100 * median(abs(case.error()) for case in good if case.experts == kind) for kind in (False, True)
    )
    speed = list(serving_speed.errors(serving_speed.rows()))
    each, first = (100 * median(abs(getattr(row, name)) for row in speed) for name in ("tpot", "ttft"))
    lines = (
        ("what", "checked against", "result"),
        ("---", "---", "---"),
        ("parameters", "trace: the class itself, built by transformers on the meta device", "equal to one"),
        ("KV cache and recurrent states", "trace: the caches that transformers fills", "equal to the byte"),
        ("FLOPs, schedules", "trace: PyTorch's `FlopCounterMode` and `torch.distributed.pipelining`", "equal to one"),
        (
            "training memory",
            "trace: the step of transformers, torchtitan, peft, bitsandbytes, Liger-Kernel or TRL with fake tensors",
            "activations within 1 %, peak within 2 % (3 % under FSDP2)",
        ),
        (
            "training on GPUs",
            f"measurement: {len(memory)} published figures of memory, {len(good)} of speed",
            f"median error: memory {median(memory):.1f} %, speed {dense:.0f} % (with experts {experts:.0f} %)",
        ),
        (
            "serving on GPUs",
            f"measurement: {len(speed)} published runs of vLLM, SGLang and TensorRT-LLM",
            f"median error: time per token {each:.0f} %, time to the first token {first:.0f} %",
        ),
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "three ways": three_ways,
    "commands": command_line,
    "training summary": training_summary,
    "training programs": lambda: "\n".join(training_memory.table()),
    "training programs of medium confidence": lambda: "\n".join(training_memory.table("medium")),
    "training rows": training_rows,
    "serving speed": serving_table,
    "training time": time_table,
    "vllm memory": vllm_table,
}


def main() -> None:
    """Write the pages anew, and say which changed."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if before != (after := written(before)):
            page.write_text(after, encoding="utf-8")
            print(f"{page.relative_to(ROOT)} is written anew")


if __name__ == "__main__":
    main()
