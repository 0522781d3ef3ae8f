"""`python -m measure list`: the workloads, the formula that each tests, and what it needs."""

from __future__ import annotations

from collections.abc import Sequence

from calc.command_line.flags import Parser
from measure.commands.tables import add_format, checked_format, table
from measure.setting import SIZES
from measure.workloads import SUITES, WORKLOADS


def main(argv: Sequence[str]) -> str:
    """The workloads as text; imports no torch."""
    parser = Parser(prog="python -m measure list", description="The workloads that `run` takes.", allow_abbrev=False)
    add_format(parser)
    form = checked_format(parser.parse_args(argv).format)
    rows = [
        _row(each.name, each.tests, each.needs, "MODEL" if each.takes_model else "its own")
        for each in WORKLOADS.values()
    ]
    for name, parts in SUITES.items():
        model = "MODEL" if any(WORKLOADS[part].takes_model for part in parts) else "its own"
        rows.append(_row(name, f"formulas of {', '.join(parts)}", "any device; passes over what it lacks", model))
    return table(rows, ("name", "tests", "needs", "sizes", "model"), form)


def _row(name: str, tests: str, needs: str, model: str) -> dict[str, str]:
    return {"name": name, "tests": tests, "needs": needs, "sizes": ", ".join(SIZES), "model": model}
