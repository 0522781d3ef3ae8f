"""`python -m calc log FILE`: a serving engine's start-up log against what is computed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from calc.breakdown import to_csv
from calc.command_line.flags import Parser, add_format, add_gpu_flags, add_plan_flags, chosen_format
from calc.command_line.tables import aligned, markdown
from calc.commands import COMMANDS, flag, word
from calc.errors import InputError
from calc.units import show_value

HELP = "a serving engine's start-up log against what is computed"
_COLUMNS = ("quantity", "logged", "predicted", "residual", "relative_error", "line")


def log(argv: Sequence[str]) -> str:
    """The answer to `log` as text. InputError for a file that cannot be read or that is no log of a known engine."""
    from calc.catalogue import load
    from calc.hardware import chosen_gpu
    from calc.serving.logs.comparison import compared, model_of
    from calc.serving.logs.reader import bounded_lines, read

    serve = COMMANDS["serve"]
    parser = Parser(prog="python -m calc log", description=HELP, allow_abbrev=False)
    parser.add_argument(
        "FILE", help="a log of vLLM, SGLang, TensorRT-LLM, llama.cpp or Ollama, or - for standard input"
    )
    parser.add_argument(
        "--model", default=None, help="the model, where the catalogue does not know the log's name for it"
    )
    add_gpu_flags(parser)
    add_plan_flags(parser, serve)
    add_format(parser)
    given = vars(parser.parse_args(argv))
    with ExitStack() as stack:
        facts = read(bounded_lines(_opened(given["FILE"], stack)))
    name = given["model"] or model_of(facts)
    gpu = chosen_gpu(given["gpu"], given["gpu_memory_gib"], given["gpu_tflops"], given["gpu_GBps"], flag)
    plan = {key: given[key] for key in serve.plan.model_fields if key in given}
    answer = compared(facts, load(name) if name else None, plan, gpu)
    form = chosen_format(given)
    if form == "json":
        return json.dumps(answer.as_json(), indent=1)
    rows = [row.as_json() for row in answer.rows]
    if form == "csv":
        return to_csv(rows, (*_COLUMNS, "unit")).rstrip("\n")
    cells = [_cells(row) for row in rows]
    data = answer.as_json()
    head = [(key, str(data[key] or "unknown")) for key in ("engine", "engine_version", "model")]
    head += [("plan", " ".join(_flag(key, value) for key, value in data["plan"].items()))]
    adopt = " ".join(f"{flag(key)} {value:g}" for key, value in answer.constants.items())
    notes = [*(f"notes: {note}" for note in answer.notes), *([f"adopt: serve ... {adopt}"] if adopt else [])]
    if form == "markdown":
        return "\n\n".join(
            [markdown(("log", ""), head), markdown(_COLUMNS, cells), "\n".join(f"- {note}" for note in notes)]
        )
    return "\n\n".join(filter(None, [aligned(head), aligned(cells, _COLUMNS), "\n".join(notes)]))


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return flag(name) if value else "--no-" + flag(name)[2:]
    return f"{flag(name)} {word(value)}"


def _opened(path: str, stack: ExitStack) -> IO[str]:
    if path == "-":
        return sys.stdin
    try:
        return stack.enter_context(Path(path).open(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise InputError(f"log: {path!r} cannot be read ({error.strerror})", "log") from None


def _cells(row: dict[str, object]) -> tuple[str, ...]:
    unit = str(row["unit"])

    def shown(key: str) -> str:
        value = row[key]
        if not isinstance(value, int | float):
            return "unknown"
        return show_value(value, unit) if unit == "bytes" else f"{value:,.6g}" if value % 1 else f"{value:,.0f}"

    error = row["relative_error"]
    percent = f"{100 * error:+.2f} %" if isinstance(error, float) else ""
    return str(row["quantity"]), shown("logged"), shown("predicted"), shown("residual"), percent, str(row["line"] or "")
