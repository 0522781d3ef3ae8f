"""`python -m calc from` and `python -m calc to`: runs as other tools write them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from calc.command_line.flags import FORMATS, Parser, add_gpu_flags, add_plan_flags
from calc.command_line.tables import aligned
from calc.commands import COMMANDS, flag
from calc.errors import InputError, validated

FROM_HELP: Final = "the scenario of another tool's command line or config file"
TO_HELP: Final = "a scenario as another tool's command line or config file"
_OWN: Final = ("--as", "--format", "--gpus")
_LARGEST: Final = 2**20  # bytes of a file


def from_(argv: Sequence[str]) -> str:
    """The answer to `from` as text. InputError for a text that cannot be read or that is of no known tool."""
    from calc.external_formats.formats import TOOLS, read

    words, own = _own_flags(argv)
    if not words or words[0] in ("-h", "--help"):
        print(
            f"usage: python -m calc from FILE | - | COMMAND  [--as {'|'.join(TOOLS)}] [--gpus N] [--format table|json]"
        )
        print(f"\n{FROM_HELP}: what was understood, what was not, and what was assumed")
        raise SystemExit(0 if words else 2)
    form = own.get("--format", "table")
    if form not in ("table", "json"):
        raise InputError.of(
            "--format", form, f"it must be one of table, json{'' if form not in FORMATS else ' for this answer'}"
        )
    scenario = read(_text_of(words), own.get("--as"), _gpus(own.get("--gpus")), _folder_of(words))
    if form == "json":
        return json.dumps(scenario.as_json(), indent=1)
    rows = [("tool", scenario.tool), ("model", scenario.model or "unknown")]
    for name in ("understood", "not_understood", "assumed"):
        rows += [(name, one) for one in getattr(scenario, name)]
    rows.append(("ask", scenario.command_line()))
    return aligned(rows, ("", ""))


def _own_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words of the run, and this command's own flags out of them."""
    words, own, index = [], {}, 0
    while index < len(argv):
        name, given, value = argv[index].partition("=")
        if name not in _OWN:
            words.append(argv[index])
        elif given:
            own[name] = value
        elif index + 1 < len(argv):
            index += 1
            own[name] = argv[index]
        else:
            raise InputError(f"{name}: a value is missing", name)
        index += 1
    return words, own


def _gpus(given: str | None) -> int | None:
    if given is None:
        return None
    if not given.isdecimal() or not 1 <= int(given[:12]) <= 10_000_000:
        raise InputError.of("--gpus", given, "it must be a whole number from 1 to 10000000")
    return int(given)


def _text_of(words: Sequence[str]) -> str:
    """The text of a file, of standard input, or the command itself."""
    if len(words) > 1:
        return shlex.join(words)
    only = words[0]
    if only == "-":
        return _decoded(sys.stdin.buffer.read(_LARGEST + 1) if sys.stdin else b"", "standard input")
    if "\0" in only:
        raise InputError.of("FILE", only, "a path holds no NUL")
    if len(only) < 4096 and os.path.lexists(only):
        from calc.sources.files import open_plain

        with open_plain(Path(only), _LARGEST, "FILE") as (file, size):
            return _decoded(file.read(size), only)
    if not any(one.isspace() for one in only):
        raise InputError.of("FILE", only, "there is no such file; a command is given with its flags")
    return only


def _folder_of(words: Sequence[str]) -> Path:
    """Where the files that a run names are looked for: next to its file, else where the command is given."""
    alone = len(words) == 1 and "\0" not in words[0] and len(words[0]) < 4096 and os.path.lexists(words[0])
    return Path(words[0]).parent if alone else Path()


def _decoded(data: bytes, name: str) -> str:
    if len(data) > _LARGEST:
        raise InputError(f"FILE: {name} is too large; a run has at most {_LARGEST:,} bytes", "FILE")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"FILE: {name} is no text in UTF-8", "FILE") from None
    if "\0" in text:
        raise InputError(f"FILE: {name} is no text", "FILE")
    return text


def to(argv: Sequence[str]) -> str:
    """The answer to `to` as text. InputError for a plan that the tool cannot run."""
    from calc.external_formats.formats import TOOLS, WRITTEN, write

    name = argv[0] if argv else ""
    if name not in WRITTEN:
        if name in ("", "-h", "--help"):
            print(f"usage: python -m calc to {'|'.join(WRITTEN)} MODEL [flags of train or serve]\n\n{TO_HELP}")
            raise SystemExit(0 if name else 2)
        raise InputError.of("FORMAT", name, f"it must be one of {', '.join(WRITTEN)}")
    command = COMMANDS[TOOLS[name].command]
    parser = Parser(prog=f"python -m calc to {name}", description=TO_HELP, allow_abbrev=False)
    parser.add_argument("MODEL")
    add_gpu_flags(parser)
    add_plan_flags(parser, command)
    given = vars(parser.parse_args(argv[1:]))
    plan = validated(command.plan, {key: given[key] for key in command.plan.model_fields if key in given}, flag)
    text, notes = write(name, given["MODEL"], plan)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return text
