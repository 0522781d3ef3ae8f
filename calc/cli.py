"""The command line: `python -m calc COMMAND`. Answers go to standard output, one line of complaint to standard error."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from calc.breakdown import to_csv
from calc.commands import COMMANDS, Answer, Command, choices, flag, is_switch, without_effect, word
from calc.errors import InputError, validated
from calc.units import GB, TB, GiB, show_value

if TYPE_CHECKING:
    from pydantic import BaseModel

    from calc.hardware import Gpu
    from calc.model.spec import ModelSpec

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a full disk answers
_PLANNED = ("communication", "scaling", "plan")
FORMATS = ("table", "json", "csv", "markdown")
MODEL_HELP = (
    "a catalogue name, a path (a config.json or its folder, a .gguf or .safetensors file or its index), "
    "a Hugging Face id (owner/name, owner/name@revision), or - for standard input"
)
_GPU_FLAGS = (
    ("gpu", str, "a GPU of the catalogue (python -m calc gpus)"),
    ("gpu_memory_gib", float, "memory of the GPU in GiB, as its driver shows it"),
    ("gpu_tflops", float, "dense peak in TFLOP/s"),
    ("gpu_GBps", float, "memory bandwidth in GB/s (10**9 bytes)"),
)
_CALIBRATED = ("off", "point", "bound")
_CALIBRATED_HELP = (
    "use what `python -m measure` found on this GPU: its medians (point) or its careful ends (bound) (default: off)"
)
_SUGGEST_HELP = "also say which changes would make it fit, how large it may get, and what a checkpoint takes"


class Parser(argparse.ArgumentParser):
    """argparse that complains as everything else does: an InputError, one line, exit 2."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}")


def run(argv: Sequence[str]) -> str:
    """The answer to a command as text. InputError on bad input; SystemExit 0 after --help."""
    lists: dict[str, Callable[[Sequence[str]], str]] = {"models": _models, "gpus": _gpus}
    if not argv or argv[0] in ("-h", "--help"):
        return _help(lists)
    name, rest = argv[0], argv[1:]
    if name in lists:
        return lists[name](rest)
    if name in _PLANNED:
        raise InputError(f"command: {name!r} is not built yet; there are {', '.join((*COMMANDS, *lists))}", "command")
    if name not in COMMANDS:
        raise InputError.of("command", name, f"it must be one of {', '.join((*COMMANDS, *lists))}")
    return _answer(COMMANDS[name], rest)


def _help(lists: Mapping[str, object]) -> str:
    lines = ["usage: python -m calc COMMAND [MODEL] [flags]   (--help after a command lists its flags)", ""]
    lines += [f"  {command.name:<10} {command.help}" for command in COMMANDS.values()]
    lines += [f"  {name:<10} the catalogue of {name}, each with its source" for name in lists]
    return "\n".join(lines)


def add_plan_flags(parser: argparse.ArgumentParser, command: Command) -> None:
    """One flag for each field of the command's plan; what is not given keeps the plan's default."""
    for name, field in command.plan.model_fields.items():
        text = (field.description or "").replace("%", "%%")
        default = field.get_default(call_default_factory=True)
        shown = f"{text} (default: {word(default)})" if default is not None else text
        if is_switch(field):
            parser.add_argument(
                flag(name), dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=shown
            )
        else:
            metavar = "|".join(map(str, choices(field))) or name.upper()
            parser.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, metavar=metavar, help=shown)


def add_gpu_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose or describe a GPU."""
    for name, kind, text in _GPU_FLAGS:
        parser.add_argument(flag(name), dest=name, type=kind, default=None, help=text)


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
    from calc.calibration import Calibrated, calibrated, of_records

    filled, notes = calibrated(plan, of_records(gpu), at)
    return Calibrated(command.answer(filled, spec, gpu), notes)


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="table", metavar="|".join(FORMATS), help="how to print (default: table)")


def chosen_format(given: Mapping[str, Any]) -> str:
    if given["format"] not in FORMATS:
        raise InputError.of("--format", given["format"], f"it must be one of {', '.join(FORMATS)}")
    return str(given["format"])


def formatted(answer: Answer, form: str) -> str:
    """The answer as a table, JSON, CSV or Markdown."""
    if form == "json":
        return json.dumps(answer.as_json(), indent=1)
    if form == "csv":
        return answer.breakdown.csv().rstrip("\n")
    data = answer.as_json()
    unit = answer.breakdown.unit
    summary = list(_summary(data, unit))
    parts = [(row.path, f"{row.value:,}", show_value(row.value, unit)) for row in answer.breakdown.rows()]
    header, stored, reasons = _stored(data.get("stored"))
    fixes = [_fix(row) for row in data.get("fixes", ())]
    remarks = [
        f"{key}: {text}" for key in ("calibration", "assumptions", "notes", "unread") for text in data.get(key, ())
    ]
    if form == "markdown":
        tables = [markdown(("quantity", "value"), summary), markdown(("path", unit, ""), parts)]
        tables += [markdown(_FIXES, fixes)] if fixes else []
        tables += [markdown(header, stored)] if stored else []
        return "\n\n".join([*tables, "\n".join(f"- {remark}" for remark in reasons + remarks)]).rstrip()
    tables = [
        aligned(summary),
        aligned(fixes, _FIXES) if fixes else "",
        aligned(parts),
        aligned(stored, header) if stored else "",
        "\n".join(reasons),
    ]
    return "\n\n".join(filter(None, [*tables, "\n".join(remarks)]))


_OFFLOADED = ("host_bytes", "nvme_bytes", "transfer_bytes", "transfer_seconds", "nvme_seconds")


def _summary(data: Mapping[str, Any], unit: str) -> Iterator[tuple[str, str]]:
    """An answer's figures, with those of its small groups (phases, overhead_bytes) below their group's name."""
    left_out = () if data.get("host_bytes") or data.get("nvme_bytes") else _OFFLOADED
    for key, value in data.items():
        if key in left_out:
            continue
        if _is_scalar(value):
            yield key, _cell(key, value)
        elif isinstance(value, Mapping) and all(isinstance(figure, int) for figure in value.values()):
            ending = "_bytes" if unit == "bytes" else ""
            yield from ((f"{key}/{name}", _cell(name + ending, figure)) for name, figure in value.items())


def _stored(stored: Mapping[str, Any] | None) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """What a checkpoint stores by group and by format as a table, and why that is not the count above."""
    header = ("stored", "elements", "bytes", "")
    if not stored:
        return header, [], []
    total = {"total": {key: stored[key] for key in ("elements", "bytes")}}
    rows: list[tuple[str, ...]] = [
        (name, f"{row['elements']:,}", f"{row['bytes']:,}", show_value(row["bytes"], "bytes"))
        for sums in (stored["by_group"], stored["by_dtype"], total)
        for name, row in sums.items()
    ]
    known = stored["difference"] is not None
    reasons = [f"stored minus the model's count: {stored['difference']:+,}"] if known else []
    return header, rows, [*reasons, *(f"  {reason}" for reason in stored["reasons"])]


_FIXES = ("what would make it fit", "needs", "saves", "cost")


def _fix(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A change that makes a step fit, as a row of a table."""
    costs = [f"{cost['ratio']:.3g}x {cost['quantity']}" if cost["ratio"] else cost["text"] for cost in row["costs"]]
    needs, saves = (show_value(row[key], "bytes") for key in ("driver_bytes", "saved_bytes"))
    return row["flags"], needs, saves, "; ".join(costs)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


_UNITS = (("_bytes", "bytes"), ("bytes_per_token", "bytes"), ("bytes_per_sequence", "bytes"), ("seconds", "seconds"))


def _cell(key: str, value: object) -> str:
    """A value with its unit for reading, exact beside it where the two differ."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    unit = next((unit for ending, unit in _UNITS if key.endswith(ending)), "FLOPs" if "flops" in key else "")
    if unit and isinstance(value, int | float):
        shown = show_value(value, unit)
        return f"{shown} ({value:,})" if isinstance(value, int) and abs(value) > 1023 else shown
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def aligned(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Aligned columns: numbers to the right, text to the left."""
    table = [header, *rows] if header else rows
    if not table:
        return ""
    columns = list(zip(*table, strict=True))
    right = [
        all(cell[:1].isdigit() or cell in ("", "unknown") for cell in column[bool(header) :]) for column in columns
    ]
    widths = [max(map(len, column)) for column in columns]
    lines = (
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(row, widths, right, strict=True)
        )
        for row in table
    )
    return "\n".join(line.rstrip() for line in lines)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


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


def guarded(action: Callable[[], object]) -> int:
    """Do it; a complaint becomes one line on standard error and its exit code. PLUMBLINE_DEBUG=1 shows tracebacks."""
    try:
        action()
        sys.stdout.flush()
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed the pipe: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of the answer goes nowhere
            print(f"standard output: it cannot be written ({error.strerror}); the answer is cut", file=sys.stderr)
            return 1
        if os.environ.get("PLUMBLINE_DEBUG"):
            raise
        print(f"internal error: {type(error).__name__}: {error} (PLUMBLINE_DEBUG=1 shows where)", file=sys.stderr)
        return 1
    return 0
