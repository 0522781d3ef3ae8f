"""A parser that complains in one line, and the flags of a plan, of a GPU and of the format."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from calc.commands import Command, choices, flag, is_switch, is_whole, word
from calc.errors import InputError
from calc.quantities import as_number

FORMATS = ("table", "json", "csv", "markdown")
_GPU_FLAGS = (
    ("gpu", str, "a GPU of the catalogue (python -m calc gpus)"),
    ("gpu_memory_gib", float, "memory of the GPU in GiB, as its driver shows it"),
    ("gpu_tflops", float, "dense peak in TFLOP/s"),
    ("gpu_GBps", float, "memory bandwidth in GB/s (10**9 bytes)"),
)


class Parser(argparse.ArgumentParser):
    """argparse that complains as everything else does: an InputError, one line, exit 2."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}")


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
            read = partial(as_number, name) if is_whole(field) else str
            parser.add_argument(
                flag(name), dest=name, type=read, default=argparse.SUPPRESS, metavar=metavar, help=shown
            )


def add_gpu_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose or describe a GPU."""
    for name, kind, text in _GPU_FLAGS:
        parser.add_argument(flag(name), dest=name, type=kind, default=None, help=text)


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="table", metavar="|".join(FORMATS), help="how to print (default: table)")


def chosen_format(given: Mapping[str, Any]) -> str:
    if given["format"] not in FORMATS:
        raise InputError.of("--format", given["format"], f"it must be one of {', '.join(FORMATS)}")
    return str(given["format"])
