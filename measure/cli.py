"""The command line of measuring: `python -m measure COMMAND`. Answers go to standard output, progress to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from calc.command_line.exit_codes import guarded
from calc.errors import InputError
from calc.version import VERSION


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand. Its module is imported when it is asked for, and has `main(arguments) -> text to print`."""

    name: str
    help: str
    module: str


_TABLE = (
    Command("trace", "memory of a training step, observed by running it with fake tensors", "measure.trace.command"),
    Command("devices", "what can be measured here, or why not", "measure.commands.devices"),
    Command("list", "the workloads, and the formula that each tests", "measure.commands.list"),
    Command("run", "measure a workload now, on the GPU or the CPU", "measure.commands.run"),
    Command("results", "what was measured before; two machines side by side", "measure.commands.results"),
    Command("import", "take in someone else's results", "measure.commands.import_results"),
)
COMMANDS = {command.name: command for command in _TABLE}


def run(argv: Sequence[str]) -> str:
    """The answer to a command as text. InputError on bad input; SystemExit 0 after --help."""
    if argv and argv[0] == "--version":
        return f"plumbline {VERSION}"
    if not argv or argv[0] in ("-h", "--help"):
        lines = ["usage: python -m measure COMMAND [flags]   (--help after a command lists its flags)", ""]
        return "\n".join([*lines, *(f"  {command.name:<10} {command.help}" for command in COMMANDS.values())])
    if argv[0] not in COMMANDS:
        raise InputError.of("command", argv[0], f"it must be one of {', '.join(COMMANDS)}")
    answer: str = import_module(COMMANDS[argv[0]].module).main(argv[1:])
    return answer


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and print its answer. Returns the exit code: 0 answered, 2 bad input, 1 our own mistake."""
    return guarded(lambda: print(run(sys.argv[1:] if argv is None else argv)))
