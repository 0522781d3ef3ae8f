"""`python -m measure results`: what was measured here before."""

from __future__ import annotations

from collections.abc import Sequence

from calc.cli import Parser
from calc.errors import InputError
from calc.records import Records
from measure.commands.tables import add_format, checked_format, results
from measure.workloads import WORKLOADS


def main(argv: Sequence[str]) -> str:
    """Saved rows as text, oldest first. InputError for an unknown workload or a store that cannot be read."""
    parser = Parser(prog="python -m measure results", description="What was measured before.", allow_abbrev=False)
    parser.add_argument("--workload", default="", metavar="NAME", help="only this workload's rows")
    parser.add_argument("--run", default="", metavar="ID", help="only this run's rows")
    add_format(parser)
    given = parser.parse_args(argv)
    if given.workload and given.workload not in WORKLOADS:
        raise InputError.of("--workload", given.workload, f"it must be one of {', '.join(WORKLOADS)}")
    return results(Records().rows(given.workload, given.run), checked_format(given.format))
