"""`python -m measure list`: the workloads, the formula that each tests, and what it needs."""

from __future__ import annotations

from collections.abc import Sequence

from calc.cli import Parser
from measure.commands.tables import add_format, checked_format, table
from measure.workloads import SIZES, WORKLOADS


def main(argv: Sequence[str]) -> str:
    """The workloads as text; imports no torch."""
    parser = Parser(prog="python -m measure list", description="The workloads that `run` takes.", allow_abbrev=False)
    add_format(parser)
    form = checked_format(parser.parse_args(argv).format)
    rows = [
        {"name": each.name, "tests": each.tests, "needs": each.needs, "sizes": ", ".join(SIZES)}
        for each in WORKLOADS.values()
    ]
    return table(rows, ("name", "tests", "needs", "sizes"), form)
