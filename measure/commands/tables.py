"""How these commands print: rows as JSON, CSV, Markdown or columns."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

from calc.breakdown import to_csv
from calc.command_line.flags import FORMATS
from calc.command_line.tables import aligned, markdown
from calc.errors import InputError
from calc.measurements.records import as_csv

RESULT_COLUMNS = ("workload", "case", "quantity", "predicted", "measured", "relative_error", "unit", "p20", "p80")


def add_format(parser: ArgumentParser, more: Sequence[str] = ()) -> None:
    """The --format flag."""
    parser.add_argument(
        "--format", default="table", metavar="|".join((*FORMATS, *more)), help="how to print (default: table)"
    )


def checked_format(form: str, more: Sequence[str] = ()) -> str:
    """The format that was asked for. InputError when there is none such."""
    if form not in (*FORMATS, *more):
        raise InputError.of("--format", form, f"it must be one of {', '.join((*FORMATS, *more))}")
    return form


def table(rows: Sequence[Mapping[str, Any]], columns: tuple[str, ...], form: str) -> str:
    """Rows in a format; CSV and JSON hold exact values, the others values for reading."""
    if form == "json":
        return json.dumps(list(rows), indent=1)
    if form == "csv":
        return to_csv(rows, columns).rstrip("\n")
    cells = [tuple(_cell(column, row[column]) for column in columns) for row in rows]
    return markdown(columns, cells) if form == "markdown" else aligned(cells, columns)


def results(rows: Sequence[Mapping[str, Any]], form: str) -> str:
    """Measured rows in a format."""
    return as_csv(rows).rstrip("\n") if form == "csv" else table(rows, RESULT_COLUMNS, form)


def _cell(column: str, value: object) -> str:
    if value is None:
        return "unknown" if column in ("predicted", "measured") else ""
    if column == "relative_error":
        return f"{value:.2%}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
