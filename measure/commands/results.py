"""`python -m measure results`: what was measured here before, or imported; two machines side by side."""

from __future__ import annotations

from collections.abc import Sequence

from calc.command_line.flags import Parser
from calc.errors import InputError
from calc.measurements.imported import compared
from calc.measurements.records import Records
from measure.commands.tables import add_format, checked_format, results, table
from measure.workloads import WORKLOADS

_COMPARED = ("workload", "case", "quantity", "unit", "first", "second", "ratio")


def main(argv: Sequence[str]) -> str:
    """Saved rows as text, oldest first. InputError for an unknown workload or machine, or a store that cannot be read."""
    parser = Parser(prog="python -m measure results", description="What was measured before.", allow_abbrev=False)
    parser.add_argument("--workload", default="", metavar="NAME", help="only this workload's rows")
    parser.add_argument("--run", default="", metavar="ID", help="only this run's rows")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="the newest rows of two machines side by side: parts of their names (devices, or files that were imported)",
    )
    add_format(parser)
    given = parser.parse_args(argv)
    form = checked_format(given.format)
    if given.workload and given.workload not in WORKLOADS:
        raise InputError.of("--workload", given.workload, f"it must be one of {', '.join(WORKLOADS)}")
    rows = Records().rows(given.workload, given.run)
    if not given.compare:
        return results(rows, form)
    lines = compared(rows, *given.compare)
    text = table(lines, _COMPARED, form)
    if form in ("json", "csv"):
        return text
    return f"first: {lines[0]['first_machine']}\nsecond: {lines[0]['second_machine']}\n\n{text}"
