"""Someone else's results: the CSV or JSON that `measure results` and the page give, checked line by line and labelled with its origin."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from calc.errors import InputError, validated
from calc.measurements.records import COLUMNS, LARGEST_LIST, Measured, Run

LARGEST_FILE: Final = 20 * 2**20  # bytes
_MOST_FACTS: Final = 40  # of an environment
_LONGEST_ROW: Final = 2**16  # characters
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_GUARD: Final = re.compile(r"'(?=[=+\-@\t\r])")  # what to_csv puts before a text that a spreadsheet would run


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be printable text")
    return text


def _fits(value: int | float) -> int | float:
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("it must be a number below 2**63")
    return value


_Text = Annotated[str, Field(max_length=300), AfterValidator(_printable)]
_Number = Annotated[int | float, AfterValidator(_fits)]


class _Row(BaseModel):
    """One line of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    workload: _Text = Field(min_length=1)
    case: _Text
    quantity: _Text = Field(min_length=1)
    predicted: _Number | None
    measured: _Number | None
    relative_error: float | int | None = None  # not read: it follows from the two above
    unit: _Text
    p20: _Number | None = None
    p80: _Number | None = None
    environment: dict[_Text, _Text | _Number | bool | None] = Field(max_length=_MOST_FACTS)
    run: _Text = ""
    started: _Text = ""


def imported(text: str | bytes, origin: str) -> list[tuple[Run, list[Measured]]]:
    """The runs of a file with their rows, in the file's order; each environment gets `origin`, and each run an id made of its content.

    InputError names the line and the field: not CSV or JSON, too large, a number that is none, a field too many.
    """
    if len(text) > LARGEST_FILE:
        raise InputError(f"file: {len(text):,} bytes are too many; at most {LARGEST_FILE:,} are read", "file")
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(
            "file: it must be UTF-8 text, the CSV or JSON of `python -m measure results`", "file"
        ) from None
    is_json = decoded.lstrip()[:1] in ("[", "{")
    # counted before anything is parsed: no text of a right row holds a line's end, or a quote that is not escaped
    _check_count(decoded.count('"workload"') if is_json else decoded.rstrip().count("\n"))
    rows = []
    for line, values in enumerate(_from_json(decoded) if is_json else _from_csv(decoded), 1):
        _check_count(line)
        rows.append(_checked(values, line))
    if not rows:
        raise InputError(f"file: it has 0 rows; from 1 to {LARGEST_LIST:,} are read at once", "file")
    groups: dict[tuple[str, str, str], list[_Row]] = {}
    for row in rows:
        groups.setdefault((row.run, row.workload, row.started), []).append(row)
    return [_run(group, origin.strip()[:100] or "a file") for group in groups.values()]


def _check_count(rows: int) -> None:
    if rows > LARGEST_LIST:
        raise InputError(f"file: it has {rows:,} rows or more; from 1 to {LARGEST_LIST:,} are read at once", "file")


def _from_json(text: str) -> Iterator[Any]:
    """The rows of a JSON list, one after the other: what comes after a wrong row, or after too many, is never built."""
    at, decoder = _past_space(text, 0), json.JSONDecoder()
    if text[at] != "[":
        raise InputError(
            "file: it must be a JSON list of rows, as `python -m measure results --format json` gives", "file"
        )
    at = _past_space(text, at + 1)
    more = text[at : at + 1] != "]"
    while more:
        try:
            row, used = decoder.raw_decode(text[at : at + _LONGEST_ROW])
        except (ValueError, RecursionError) as error:
            raise InputError(f"file: not JSON ({str(error) or 'nested too deeply'})", "file") from None
        yield row
        at = _past_space(text, at + used)
        more = text[at : at + 1] == ","
        if not more and text[at : at + 1] != "]":
            raise InputError("file: not JSON (no comma or ] after a row)", "file")
        at = _past_space(text, at + 1) if more else at
    if _past_space(text, at + 1) < len(text):
        raise InputError("file: not JSON (it goes on after its last ])", "file")


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found  # it matches nothing too
    return found.end()


def _from_csv(text: str) -> Iterator[Any]:
    """The rows of a CSV, one after the other."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = reader.fieldnames or ()
        if not set(COLUMNS) <= set(names):
            missing = ", ".join(name for name in COLUMNS if name not in names)
            raise InputError(f"file: neither JSON nor a CSV of results: its first line lacks {missing}", "file")
        if len(names) > len(_Row.model_fields):
            raise InputError(
                f"file: its first line has {len(names):,} columns; the known ones are {', '.join(_Row.model_fields)}",
                "file",
            )
        for row in reader:
            yield _from_cells(row)
    except csv.Error as error:
        raise InputError(f"file: not CSV (line {reader.line_num}: {error})", "file") from None


def _from_cells(row: Mapping[str | None, Any]) -> dict[Any, Any]:
    values: dict[Any, Any] = {
        key: _GUARD.sub("", cell, count=1) if isinstance(cell, str) else cell for key, cell in row.items()
    }
    for name in ("predicted", "measured", "relative_error", "p20", "p80"):
        if name in values:
            values[name] = _number(values[name])
    with suppress(
        TypeError, ValueError, RecursionError
    ):  # left as it is for the check of the row, which names the line
        values["environment"] = json.loads(values["environment"])
    return values


def _number(cell: Any) -> Any:
    """The number of a cell, None for an empty one; what is no number stays for the check of the row."""
    if not isinstance(cell, str) or len(cell) > 40:
        return cell
    if re.fullmatch(r"-?\d+", cell):
        return int(cell)
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell


def _checked(values: Any, line: int) -> _Row:
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InputError(f"row {line}: it must be an object with {', '.join(COLUMNS)}", "file")
    try:
        return validated(_Row, values)
    except InputError as error:
        raise InputError(f"row {line}: {error}", "file") from None


def _run(rows: Sequence[_Row], origin: str) -> tuple[Run, list[Measured]]:
    measured = [
        Measured(row.case, row.quantity, row.predicted, row.measured, row.unit, row.p20, row.p80) for row in rows
    ]
    first = rows[0]
    environment = {**first.environment, "origin": origin}
    digest = hashlib.sha256(repr((first.workload, first.started, measured)).encode()).hexdigest()[:32]
    run = Run(f"imported-{digest}", first.workload, first.started, {}, environment, "imported", f"from {origin}")
    return run, measured


def origin_of(environment: Mapping[str, Any]) -> str:
    """Where results came from, "" for those measured here."""
    return str(environment.get("origin", ""))


def machine_of(environment: Mapping[str, Any]) -> str:
    """The machine of a result by name: its device, and where the result came from when it was not measured here."""
    device, origin = str(environment.get("device", "unknown")), origin_of(environment)
    return f"{device} (from {origin})" if origin else device


def compared(rows: Iterable[Mapping[str, Any]], first: str, second: str) -> list[dict[str, Any]]:
    """The newest result of each quantity on two machines side by side, with `ratio` = second / first; None where a side lacks it.

    `first` and `second` are parts of a machine's name, in any case. InputError unless each names one machine.
    """
    found: dict[str, dict[tuple[str, str, str, str], Any]] = {}
    for row in rows:  # the newest comes last
        key = (row["workload"], row["case"], row["quantity"], row["unit"])
        found.setdefault(machine_of(row["environment"]), {})[key] = row["measured"]
    names = [_machine(text, found) for text in (first, second)]
    left, right = (found[name] for name in names)
    lines = []
    for key in dict.fromkeys([*left, *right]):
        a, b = left.get(key), right.get(key)
        ratio = b / a if a and b is not None else None
        line = dict(zip(("workload", "case", "quantity", "unit"), key, strict=True))
        lines.append(
            {**line, "first": a, "second": b, "ratio": ratio, "first_machine": names[0], "second_machine": names[1]}
        )
    return lines


def _machine(text: str, known: Iterable[str]) -> str:
    names = list(known)
    match = [name for name in names if name.casefold() == text.casefold()] or [
        name for name in names if text.casefold() in name.casefold()
    ]
    if len(match) != 1:
        allowed = f"it must be part of one of: {'; '.join(names)}" if names else "nothing was measured or imported yet"
        raise InputError.of("--compare", text, allowed)
    return match[0]
