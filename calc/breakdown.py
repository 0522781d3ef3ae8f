"""The one language of formula, trace and measurement: a tree of named parts whose leaves sum to the root."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

Number = int | float
_SYMBOL = re.compile(r"<([^<>]+)>")


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula with its source.

    `latex` writes each symbol as `<s>`, so that it can be shown with letters or with the user's numbers put in. It uses only
    `+ - \\cdot \\frac{}{} ^{} ( ) \\lceil \\rceil \\lfloor \\rfloor \\max(,) \\min(,)`, which the tests evaluate: the
    formula with its numbers is the value of its leaf.
    `source` says where the formula is from (a paper with its section, a file of a public program); `url` links it.
    `assumes` lists what must hold for it to be right.
    """

    latex: str
    source: str
    url: str = ""
    assumes: tuple[str, ...] = ()

    def symbolic(self) -> str:
        """The formula in letters, as LaTeX."""
        return _SYMBOL.sub(r"\1", self.latex)

    def with_numbers(self, numbers: Mapping[str, Number]) -> str:
        """The formula with numbers in place of its letters, as LaTeX. KeyError if one is missing."""
        return _SYMBOL.sub(lambda match: _latex_number(numbers[match[1]]), self.latex)


def _latex_number(value: Number) -> str:
    return f"{value:,}".replace(",", "{,}") if isinstance(value, int) else f"{value:.6g}"


@dataclass(frozen=True, slots=True)
class Component:
    """A part of a whole: a leaf with a value, or a node with children; either may stand for `count` equal copies.

    Totals are derived, never stored: a leaf's total is `value * count`, a node's `count` times the sum of its children.
    """

    name: str
    value: Number = 0
    children: tuple[Component, ...] = ()
    count: int = 1
    formula: Formula | None = None
    numbers: Mapping[str, Number] = field(default_factory=dict)

    @property
    def total(self) -> Number:
        """The whole of this part, all copies counted."""
        if not self.children:
            return self.value * self.count
        return self.count * sum(child.total for child in self.children)

    def child(self, name: str) -> Component:
        """The child of that name. KeyError when there is none."""
        for child in self.children:
            if child.name == name:
                return child
        raise KeyError(name)


def unique_names(parts: Iterable[Component]) -> tuple[Component, ...]:
    """The parts in order, each under its own name: a second `dense` becomes `dense_2`, so that paths stay unique."""
    seen: dict[str, int] = {}
    named = []
    for part in parts:
        seen[part.name] = seen.get(part.name, 0) + 1
        again = seen[part.name] > 1
        named.append(replace(part, name=f"{part.name}_{seen[part.name]}") if again else part)
    return tuple(named)


class Row(NamedTuple):
    """One leaf, flat: what a table, a chart, a CSV and a JSON file show. `value` counts all copies."""

    path: str
    value: Number
    copies: int
    component: Component


def plain_label(path: str) -> str:
    """A path or a name for reading."""
    return path.replace("/", " › ").replace("_", " ")


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A tree of parts with one unit: "bytes", "parameters", "FLOPs" or "seconds"."""

    root: Component
    unit: str
    label: Callable[[str], str] = plain_label  # of a path below the root, for reading

    @property
    def total(self) -> Number:
        return self.root.total

    def rows(self) -> list[Row]:
        """Every leaf with its stable path (`parameters/layers/attention/query`), in order; values sum to `total`.

        A root without a name adds nothing to the paths.
        """
        return list(_rows(self.root, "", 1))

    def components(self) -> list[dict[str, Any]]:
        """The leaves as the JSON of the command line: path, value, unit, formula, source (and count, url, assumes, numbers)."""
        return [_as_dict(row, self.unit) for row in self.rows()]

    def csv(self) -> str:
        """The leaves as CSV with exact integers; the header names the unit of `value`."""
        return to_csv(self.components(), ("path", "value", "unit", "count", "formula", "source"))


def _rows(part: Component, prefix: str, copies: int) -> Iterator[Row]:
    path = f"{prefix}/{part.name}" if prefix and part.name else prefix or part.name
    copies *= part.count
    if not part.children:
        yield Row(path, part.value * copies, copies, part)
    for child in part.children:
        yield from _rows(child, path, copies)


def _as_dict(row: Row, unit: str) -> dict[str, Any]:
    formula = row.component.formula
    return {
        "path": row.path,
        "value": row.value,
        "unit": unit,
        "count": row.copies,
        "formula": formula.symbolic() if formula else "",
        "with_numbers": formula.with_numbers(row.component.numbers) if formula else "",
        "source": formula.source if formula else "",
        "url": formula.url if formula else "",
        "assumes": list(formula.assumes) if formula else [],
    }


def to_csv(rows: Iterable[Mapping[str, Any]], columns: tuple[str, ...]) -> str:
    """Rows as CSV text (RFC 4180, "\\n" line ends) with the named columns only.

    A text cell that a spreadsheet would run as a formula (it begins with = + - or @) is kept from running by a quote.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([safe_cell(row.get(column, "")) for column in columns])
    return out.getvalue()


def safe_cell(value: object) -> object:
    """A cell as a file for spreadsheets may hold it: a text that would be run as a formula gets a quote before it."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


class Pair(NamedTuple):
    """One path of two breakdowns laid side by side; None where a side lacks it. `error` is (observed - predicted)/observed."""

    path: str
    predicted: Number | None
    observed: Number | None
    error: float | None


def compare(predicted: Breakdown, observed: Breakdown) -> list[Pair]:
    """Join two breakdowns by path. What only one side has stays visible, and the last row is the total of both.

    Leaves of one side that lie below a leaf of the other are summed into it. ValueError when the units differ.
    """
    if predicted.unit != observed.unit:
        raise ValueError(f"cannot compare {predicted.unit} with {observed.unit}")
    left, right = _values(predicted), _values(observed)
    paths = _common(left, right)
    left, right = _gather(left, paths), _gather(right, paths)
    pairs = [_pair(path, left.get(path), right.get(path)) for path in paths]
    return [*pairs, _pair("total", predicted.total, observed.total)]


def _values(breakdown: Breakdown) -> dict[str, Number]:
    values: dict[str, Number] = {}
    for row in breakdown.rows():
        values[row.path] = values.get(row.path, 0) + row.value
    return values


def _common(left: Mapping[str, Number], right: Mapping[str, Number]) -> list[str]:
    """The leaves of both, without those that lie below another's leaf."""
    paths = dict.fromkeys([*left, *right])
    return [path for path in paths if not any(path[:at] in paths for at in _slashes(path))]


def _slashes(path: str) -> list[int]:
    return [at for at, letter in enumerate(path) if letter == "/"]


def _gather(values: Mapping[str, Number], paths: list[str]) -> dict[str, Number]:
    known = set(paths)
    gathered: dict[str, Number] = {}
    for path, value in values.items():
        target = next((path[:at] for at in _slashes(path) if path[:at] in known), path)
        gathered[target] = gathered.get(target, 0) + value
    return gathered


def _pair(path: str, predicted: Number | None, observed: Number | None) -> Pair:
    known = predicted is not None and observed
    return Pair(path, predicted, observed, (observed - predicted) / observed if known else None)  # type: ignore[operator]
