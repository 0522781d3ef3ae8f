"""The command line: `python -m calc COMMAND`. Answers go to standard output, one line of complaint to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from calc.breakdown import to_csv
from calc.command_line.exit_codes import guarded
from calc.command_line.external_runs import FROM_HELP, TO_HELP, from_, to
from calc.command_line.flags import Parser, add_format, add_gpu_flags, add_plan_flags, chosen_format
from calc.command_line.log import HELP as LOG_HELP
from calc.command_line.log import log
from calc.command_line.tables import aligned, formatted, markdown
from calc.commands import COMMANDS, Answer, Command, flag, without_effect
from calc.errors import InputError, validated
from calc.units import GB, TB, GiB
from calc.version import VERSION

if TYPE_CHECKING:
    from pydantic import BaseModel

    from calc.hardware import Gpu
    from calc.model.spec import ModelSpec

MODEL_HELP = (
    "a catalogue name, a path (a config.json or its folder, a .gguf or .safetensors file or its index), "
    "a Hugging Face id (owner/name, owner/name@revision; hub:owner/name is never a path), or - for standard input"
)
_CALIBRATED = ("off", "point", "bound")
_CALIBRATED_HELP = (
    "use what `python -m measure` found on this GPU: its medians (point) or its careful ends (bound) (default: off)"
)
_SUGGEST_HELP = "also say which changes would make it fit, how large it may get, and what else helps to go on"


def run(argv: Sequence[str]) -> str:
    """The answer to a command as text. InputError on bad input; SystemExit 0 after --help."""
    lists: dict[str, Callable[[Sequence[str]], str]] = {"models": _models, "gpus": _gpus}
    if argv and argv[0] == "--version":
        return f"plumbline {VERSION}"
    if not argv or argv[0] in ("-h", "--help"):
        return help_text()
    name, rest = argv[0], argv[1:]
    if name in lists:
        return lists[name](rest)
    others: dict[str, Callable[[Sequence[str]], str]] = {"log": log, "from": from_, "to": to}
    if name in others:
        return others[name](rest)
    if name not in COMMANDS:
        raise InputError.of("command", name, f"it must be one of {', '.join((*COMMANDS, *others, *lists))}")
    return _answer(COMMANDS[name], rest)


def help_text(more: Sequence[tuple[str, str]] = ()) -> str:
    """Every command with a line of help; `more` adds rows (name, help) of another program that answers them too."""
    rows = [(command.name, command.help) for command in COMMANDS.values()]
    rows += [("log", LOG_HELP), ("from", FROM_HELP), ("to", TO_HELP)]
    rows += [(name, f"the catalogue of {name}, each with its source") for name in ("models", "gpus")]
    rows += more
    width = max(len(name) for name, _ in rows)
    lines = ["usage: python -m calc COMMAND [MODEL] [flags]   (--help after a command lists its flags)", ""]
    return "\n".join(lines + [f"  {name:<{width}} {text}" for name, text in rows])


def _answer(command: Command, argv: Sequence[str]) -> str:
    parser = Parser(prog=f"python -m calc {command.name}", description=command.help, allow_abbrev=False)
    if command.takes_model:
        parser.add_argument("MODEL", help=MODEL_HELP)
    if command.takes_gpu:
        add_gpu_flags(parser)
        parser.add_argument("--calibrated", default="off", metavar="|".join(_CALIBRATED), help=_CALIBRATED_HELP)
    if command.suggests:
        parser.add_argument("--suggest", action="store_true", help=_SUGGEST_HELP)
    add_plan_flags(parser, command)
    add_format(parser)
    given = vars(parser.parse_args(argv))
    if given.get("suggest"):
        command = replace(command, function=command.suggests)
    plan = validated(command.plan, {key: given[key] for key in command.plan.model_fields if key in given}, flag)
    for name, reason in without_effect(plan).items():
        print(f"note: {flag(name)} changes nothing: {reason}", file=sys.stderr)
    if command.stored:
        return formatted(command.answer_with_stored(plan, given["MODEL"]), chosen_format(given))
    spec = gpu = None
    if command.takes_model:
        from calc.catalogue import load

        spec = load(given["MODEL"])
    if command.takes_gpu:
        from calc.hardware import chosen_gpu

        gpu = chosen_gpu(given["gpu"], given["gpu_memory_gib"], given["gpu_tflops"], given["gpu_GBps"], flag)
        if given["calibrated"] != "off":
            return formatted(_calibrated(command, plan, spec, gpu, given["calibrated"]), chosen_format(given))
    return formatted(command.answer(plan, spec, gpu), chosen_format(given))


def _calibrated(command: Command, plan: BaseModel, spec: ModelSpec | None, gpu: Gpu | None, at: Any) -> Answer:
    """The answer with what was measured on the GPU in the fields that were left at their default."""
    if at not in _CALIBRATED:
        raise InputError.of("--calibrated", at, f"it must be one of {', '.join(_CALIBRATED)}")
    from calc.measurements.calibration import Calibrated, calibrated, of_records

    filled, notes = calibrated(plan, of_records(gpu), at)
    return Calibrated(command.answer(filled, spec, gpu), notes)


def _models(argv: Sequence[str]) -> str:
    from calc.catalogue import catalogue, load
    from calc.parameters import parameters

    rows = []
    for entry in _found(argv, "models", catalogue()):
        answer = parameters(load(entry.name))
        rows.append(
            {
                "name": entry.name,
                "hub_id": entry.hub_id,
                "total": answer.total,
                "active": answer.active,
                "architecture": answer.spec.architecture,
                "hub_total": entry.hub_total,
                "source": entry.config_source,
                "note": entry.note,
            }
        )
    return _listing(rows, argv, ("name", "total", "active", "architecture", "source"))


def _gpus(argv: Sequence[str]) -> str:
    from calc.hardware import gpus

    rows = [gpu.facts() for gpu in _found(argv, "gpus", gpus())]
    for row in rows:
        row["memory_GiB"] = _in(row["memory_bytes"], GiB)
        row["bandwidth_GBps"] = _in(row["memory_bandwidth_bytes_per_s"], GB)
        row["bf16_TFLOPs"] = _in(row["peak_flops"].get("bf16"), TB)
        row["source"] = "; ".join(row["sources"])
    columns = ("name", "memory_GiB", "bandwidth_GBps", "bf16_TFLOPs", "confidence", "source")
    return _listing(rows, argv, columns)


def _in(value: float | None, unit: int) -> float | None:
    return None if value is None else round(value / unit, 2)


def _list_parser(name: str) -> Parser:
    parser = Parser(prog=f"python -m calc {name}", description=f"The catalogue of {name}.", allow_abbrev=False)
    parser.add_argument("--search", default="", metavar="TEXT", help="only names that hold this text")
    add_format(parser)
    return parser


def _found(argv: Sequence[str], name: str, rows: Mapping[str, Any]) -> list[Any]:
    wanted = _list_parser(name).parse_args(argv).search.lower()
    return [row for key, row in rows.items() if wanted in key.lower()]


def _listing(rows: list[dict[str, Any]], argv: Sequence[str], columns: tuple[str, ...]) -> str:
    form = chosen_format(vars(_list_parser("").parse_args(argv)))
    if form == "json":
        return json.dumps(rows, indent=1)
    if form == "csv":
        return to_csv(rows, columns).rstrip("\n")
    cells = [
        tuple(
            "unknown" if row[key] is None else f"{row[key]:,}" if isinstance(row[key], int | float) else row[key]
            for key in columns
        )
        for row in rows
    ]
    return markdown(columns, cells) if form == "markdown" else aligned(cells, columns)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and print its answer. Returns the exit code: 0 answered, 2 bad input, 1 our own mistake."""
    return guarded(lambda: print(run(sys.argv[1:] if argv is None else argv)))
