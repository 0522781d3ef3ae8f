"""`python -m measure trace --script train.py [args]`: the user's own program, run with fake tensors on a make-believe GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from calc.command_line.flags import FORMATS, Parser, add_gpu_flags
from calc.command_line.tables import aligned, markdown
from calc.commands import flag
from calc.errors import InputError
from calc.hardware import chosen_gpu
from calc.units import GiB, show_bytes
from measure.commands.tables import checked_format
from measure.script.child import observe_script
from measure.trace.flags import seconds_of

_MOST = 12  # rows of modules and lines that a table shows


def parser() -> Parser:
    made = Parser(
        prog="python -m measure trace",
        description="Memory of your own training program, observed: this runs your code, with your rights, up to its second "
        "optimizer step. Everything after the script's name goes to it: give flags of the trace before --script.",
        allow_abbrev=False,
    )
    add_gpu_flags(made)
    made.add_argument("--steps", default="2", help="end the program after so many optimizer steps")
    made.add_argument("--ranks", default="1", help="GPUs that the program is told of; it is rank 0 of them")
    made.add_argument("--seconds", default="120", help="end the program after this long")
    made.add_argument("--memory-gib", default="8", help="memory of the host that the program may take")
    made.add_argument("--format", default="table", metavar="|".join(FORMATS), help="how to print (default: table)")
    made.add_argument("--script", required=True, help="your program, followed by its own arguments")
    return made


def main(argv: Sequence[str]) -> str:
    """The answer as text. InputError on bad input and on a program that a trace cannot follow, with the program's line."""
    own, args = _split(argv)
    if {"-h", "--help"} & set(own):
        parser().parse_args(["--help"])
    given = vars(parser().parse_args(own))
    form = checked_format(given["format"])
    gpu = (given["gpu"], given["gpu_memory_gib"], given["gpu_tflops"], given["gpu_GBps"])
    chosen_gpu(*gpu, flag)  # before anything is run
    found = observe_script(
        given["script"],
        args,
        gpu,
        steps=_count("steps", given["steps"], 1000),
        ranks=_count("ranks", given["ranks"], 65536),
        seconds=seconds_of(given["seconds"]),
        memory_bytes=_count("memory_gib", given["memory_gib"], 4096) * GiB,
    )
    return json.dumps(found, indent=2) if form == "json" else table(found, form)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The trace's own arguments, up to the script's name, and the script's."""
    at = next(
        (index for index, word in enumerate(argv) if word == "--script" or word.startswith("--script=")), len(argv)
    )
    end = at + (1 if "=" in "".join(argv[at : at + 1]) else 2)
    return list(argv[:end]), list(argv[end:])


def _count(name: str, text: str, high: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= high:
        raise InputError.of(flag(name), text, f"it must be a whole number from 1 to {high}")
    return int(text)


def table(found: Mapping[str, Any], form: str) -> str:
    """The answer as rows of name, bytes and what is said of them."""
    rows = [*_totals(found), *_rows(found)]
    if form == "csv":
        return "\n".join(["name,bytes,note", *(f'"{name}",{value},"{note}"' for name, value, note in rows)])
    cells = [(name, f"{value:,}" if isinstance(value, int) else "", note.strip()) for name, value, note in rows]
    columns = ("name", "bytes", "note")
    return markdown(columns, cells) if form == "markdown" else aligned(cells, columns)


Row = tuple[str, "int | None", str]


def _totals(found: Mapping[str, Any]) -> list[Row]:
    peak = found["peak_line"]
    rows: list[Row] = [
        ("peak", found["peak_bytes"], f"{found['peak_phase']}, line {peak['line']}: {peak['text'][:60]}")
    ]
    rows += [(f"phase {name}", value, show_bytes(value)) for name, value in found["phases"].items()]
    rows += [("driver", found["driver_bytes"], "what nvidia-smi would show")]
    if found["gpu_memory_bytes"] is not None:
        rows.append(("GPU memory", found["gpu_memory_bytes"], "it fits" if found["fits"] else "it does not fit"))
    if full := found["out_of_memory"]:
        where = f"line {full['line']} ({full['text'][:60]}) asks for {show_bytes(full['asked_bytes'])}"
        what = f"in {full['phase']}, {full['module'] or 'outside modules'}, {full['operation']}"
        rows.append(("out of memory", full["held_bytes"] + full["asked_bytes"], f"{where} {what}"))
    return rows


def _rows(found: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = [(f"part {name}", value, "") for name, value in found["parts"].items()]
    rows += [(f"module {name}", value, "") for name, value in list(found["modules"].items())[:_MOST]]
    rows += [(f"line {row['line']}", row["bytes"], row["text"][:60]) for row in found["lines"][:_MOST]]
    for row in found["suggestions"]:
        rows.append(("change", row["saves_bytes"], f"{row['change']}{': enough' if row['enough'] else ''}"))
    rows += [("note", None, f"{row['text']} (line {row['line']['line']})") for row in found["notes"]]
    return rows
