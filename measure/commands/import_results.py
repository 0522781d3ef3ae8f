"""`python -m measure import FILE`: take in someone else's results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calc.command_line.flags import Parser
from calc.measurements.imported import LARGEST_FILE, imported
from calc.measurements.records import Records
from calc.sources.files import open_plain


def main(argv: Sequence[str]) -> str:
    """A line that says what was taken in. InputError when the file cannot be read or a row is not right; then nothing is."""
    parser = Parser(prog="python -m measure import", description="Take in someone else's results.", allow_abbrev=False)
    parser.add_argument("FILE", help="the CSV or JSON of `python -m measure results`")
    parser.add_argument("--origin", default="", metavar="TEXT", help="where they are from (default: the file's name)")
    given = parser.parse_args(argv)
    path = Path(given.FILE)
    with open_plain(path, LARGEST_FILE, "FILE") as (file, size):
        content = file.read(size)
    runs = imported(content, given.origin or path.name)
    records = Records()
    count = records.take(runs)
    return (
        f"{count:,} rows of {len(runs):,} runs were taken in, from {given.origin or path.name}; kept in {records.path}"
    )
