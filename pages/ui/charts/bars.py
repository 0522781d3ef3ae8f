"""Stacked bars of named parts, up to a limit where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pages.ui.charts.drawing import LINES, RED, draw, legend, scale_of
from pages.ui.numbers import Numbers
from pages.ui.parts import COLOURS, FREE, Parts, in_order

_ROW: Final = 46  # pixels of a bar with its gap


@dataclass(frozen=True, slots=True)
class Limit:
    """A value that rows are held against: its name and amount."""

    name: str
    value: float


def stacked(
    rows: Mapping[str, Parts], unit: str, numbers: Numbers, key: str, said: str, limit: Limit | None = None
) -> None:
    """A stacked bar for each row, of named parts that sum to the row; a part has one colour in the whole app.

    `said` describes the chart. With a limit, a dashed line crosses all rows, and what is free up to it is drawn. The legend of a
    single row gives the value of each part.
    """
    most = max(sum(value for _, value in parts) for parts in rows.values())
    scale, suffix = scale_of(unit, numbers, max(most, limit.value if limit else 0))
    filled = {row: _with_free(parts, limit) for row, parts in rows.items()}
    data = [segment for row, parts in filled.items() for segment in _segments(row, parts, unit, numbers, scale)]
    names = in_order(segment["part"] for segment in data)
    colours = {name: COLOURS.get(name) or LINES[place % len(LINES)] for place, name in enumerate(names)}
    spec = {
        "height": {"step": _ROW if len(rows) > 1 else 64},
        "encoding": {
            "y": {"field": "row", "type": "nominal", "sort": None, "title": None, "axis": _row_names(len(rows) > 1)}
        },
        "layer": [_bars(colours, suffix), *_limit_line(limit, unit, numbers, scale, most)],
    }
    draw(data, spec, key, said)
    alone = dict(next(iter(filled.values()))) if len(filled) == 1 else {}
    legend((name, colours[name], numbers.show(alone[name], unit) if name in alone else "") for name in names)


def _with_free(parts: Parts, limit: Limit | None) -> Parts:
    left = limit.value - sum(value for _, value in parts) if limit else 0
    return [*parts, (FREE, left)] if left > 0 else parts


def _segments(row: str, parts: Parts, unit: str, numbers: Numbers, scale: int) -> Iterator[dict[str, Any]]:
    end = 0.0
    for name, value in parts:
        start, end = end, end + value / scale
        yield {"row": row, "part": name, "start": start, "end": end, "shown": f"{name}: {numbers.show(value, unit)}"}


def _bars(colours: Mapping[str, str], suffix: str) -> dict[str, Any]:
    return {
        "mark": {"type": "bar", "height": {"band": 0.78}},
        "encoding": {
            "x": {
                "field": "start",
                "type": "quantitative",
                "title": None,
                "axis": {"tickCount": 6, "labelExpr": f"datum.label + '{suffix}'"},
            },
            "x2": {"field": "end"},
            "color": {
                "field": "part",
                "type": "nominal",
                "sort": None,
                "scale": {"domain": list(colours), "range": list(colours.values())},
                "legend": None,
            },
            "tooltip": {"field": "shown"},
        },
    }


def _limit_line(limit: Limit | None, unit: str, numbers: Numbers, scale: int, most: float) -> list[dict[str, Any]]:
    """A dashed line across all rows, with its name above; nothing where there is no limit. `most` is the longest row."""
    if limit is None:
        return []
    once: dict[str, Any] = {"values": [{}]}
    at: dict[str, Any] = {"x": {"datum": limit.value / scale}, "y": None}
    text = {
        "type": "text",
        "text": f"{limit.name}: {numbers.show(limit.value, unit)}",
        "y": -9,
        "align": "right" if 2 * limit.value > most else "left",  # towards the side that is free
        "color": RED,
    }
    return [
        {"data": once, "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 2, "color": RED}, "encoding": at},
        {"data": once, "mark": text, "encoding": at},
    ]


def _row_names(shown: bool) -> dict[str, Any] | None:
    return {"labelLimit": 220, "ticks": False, "domain": False} if shown else None
