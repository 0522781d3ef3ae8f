"""`python -m measure import FILE`: take in someone else's results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calc.cli import Parser
from calc.errors import InputError
from calc.imported import LARGEST_FILE, imported
from calc.records import Records


def main(argv: Sequence[str]) -> str:
    """A line that says what was taken in. InputError when the file cannot be read or a row is not right; then nothing is."""
    parser = Parser(prog="python -m measure import", description="Take in someone else's results.", allow_abbrev=False)
    parser.add_argument("FILE", help="the CSV or JSON of `python -m measure results`")
    parser.add_argument("--origin", default="", metavar="TEXT", help="where they are from (default: the file's name)")
    given = parser.parse_args(argv)
    path = Path(given.FILE)
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError.of("FILE", given.FILE, f"it must be a file that can be read ({reason})") from None
    runs = imported(content, given.origin or path.name)
    records = Records()
    count = records.take(runs)
    return (
        f"{count:,} rows of {len(runs):,} runs were taken in, from {given.origin or path.name}; kept in {records.path}"
    )
