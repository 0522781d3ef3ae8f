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
    Command("trace --script", "the same of your own program, up to its second step", "measure.script.command"),
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
        return "\n".join([*lines, *(f"  {command.name:<15} {command.help}" for command in COMMANDS.values())])
    name = "trace --script" if argv[0] == "trace" and _names_a_script(argv[1:]) else argv[0]
    if name not in COMMANDS:
        raise InputError.of("command", argv[0], f"it must be one of {', '.join(COMMANDS)}")
    answer: str = import_module(COMMANDS[name].module).main(argv[1:])
    return answer


def _names_a_script(words: Sequence[str]) -> bool:
    return any(word == "--script" or word.startswith("--script=") for word in words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and print its answer. Returns the exit code: 0 answered, 2 bad input, 1 our own mistake."""
    return guarded(lambda: print(run(sys.argv[1:] if argv is None else argv)))
