"""Lines over one field, with a band, a level across and a mark where the scenario stands."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import streamlit as st

from pages.ui.charts.bars import Limit
from pages.ui.charts.drawing import LINES, RED, draw, legend, scale_of
from pages.ui.numbers import Numbers
from pages.ui.parts import Parts, colour_of, in_order

_TALL: Final = 280  # pixels of a curve
# the numbers along a logarithmic axis, as people say them
_TENS: Final = "datum.label ? replace(format(datum.value, '~s'), 'G', 'B') : ''"
_TWOS: Final = (
    "datum.value >= 1048576 ? format(datum.value / 1048576, '~r') + 'M' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '.3~r') + 'k' : datum.label"
)
_ONCE: Final[Mapping[str, Any]] = {"values": [{}]}


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) of one line; None where there is no answer."""

    name: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Band:
    """Points (x, low, high) between which a line may lie."""

    name: str
    points: Sequence[tuple[float, float, float]]

    def edges(self) -> list[Curve]:
        """Its two ends as lines."""
        low = [(at, low) for at, low, _ in self.points]
        return [
            Curve(f"{self.name}, low", low),
            Curve(f"{self.name}, high", [(at, high) for at, _, high in self.points]),
        ]


def curves(
    lines: Sequence[Curve],
    x: str,
    unit: str,
    numbers: Numbers,
    key: str,
    said: str,
    limit: Limit | None = None,
    now: float | None = None,
    log: bool = True,
    steep: bool = False,
    band: Band | None = None,
) -> None:
    """Lines over x, of values of one unit. `limit` is a level across; `now` marks where the scenario stands; `steep` values have
    an axis of their own powers; `band` is drawn as an area behind the lines."""
    known = [(line.name, at, value) for line in lines for at, value in line.points if value is not None]
    if not known:
        st.info("No value of this field gives an answer.")
        return
    scale, suffix = scale_of(unit, numbers, max(value for *_, value in known))
    data = [
        {
            "line": name,
            "x": at,
            "y": value / scale,
            "shown": f"{at:,.6g}: {numbers.show(value, unit) if unit else numbers.count(value)}",
        }
        for name, at, value in known
    ]
    far = max(at for _, at, _ in known) > 2**30  # tokens of a run: people say 1B and 1T, not powers of two
    horizontal = {
        "field": "x",
        "type": "quantitative",
        "title": x,
        "scale": {"type": "log", "base": 10 if far else 2} if log else {"zero": False},
        "axis": {"labelExpr": _TENS if far else _TWOS, "grid": False} if log else {},
    }
    vertical = {
        "field": "y",
        "type": "quantitative",
        "title": None,
        "scale": {"type": "log"} if steep else {},
        "axis": {"labelExpr": f"datum.label ? datum.label + '{suffix}' : ''", "tickCount": 5},
    }
    names = [line.name for line in lines]
    layers = [*_area(band, scale, horizontal, vertical), _lines(names, horizontal, vertical)]
    spec = {"height": _TALL, "layer": [*layers, *_level(limit, unit, numbers, scale), *_mark_now(now)]}
    draw(data, spec, key, said)
    shown = [(name, LINES[place % len(LINES)], "") for place, name in enumerate(names)]
    if len(shown) > 1 or band:
        legend([*shown, *([(band.name, f"{LINES[0]}44", "")] if band else [])])
    _points([*lines, *(band.edges() if band else [])], x, unit, key)


def _points(lines: Sequence[Curve], x: str, unit: str, key: str) -> None:
    st.download_button(
        "Points",
        lambda: as_csv(lines, x, unit),
        f"{key}.csv",
        "text/csv",
        key=f"{key} points",
        help="The curve's points as CSV, exact",
        on_click="ignore",
        icon=":material/download:",
        type="tertiary",
    )


def _lines(names: Sequence[str], horizontal: Mapping[str, Any], vertical: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "mark": {"type": "line", "point": True, "strokeWidth": 2.5},
        "encoding": {
            "x": horizontal,
            "y": vertical,
            "color": {
                "field": "line",
                "type": "nominal",
                "sort": None,
                "scale": {"domain": list(names), "range": list(LINES)},
                "legend": None,
            },
            "tooltip": [{"field": "line"}, {"field": "shown"}],
        },
    }


def _area(
    band: Band | None, scale: int, horizontal: Mapping[str, Any], vertical: Mapping[str, Any]
) -> list[dict[str, Any]]:
    if band is None:
        return []
    values = [{"x": at, "y": low / scale, "high": high / scale} for at, low, high in band.points]
    return [
        {
            "data": {"values": values},
            "mark": {"type": "area", "opacity": 0.27, "color": LINES[0]},
            "encoding": {"x": horizontal, "y": vertical, "y2": {"field": "high"}},
        }
    ]


def areas(
    stops: Sequence[tuple[str, Parts]], unit: str, numbers: Numbers, key: str, said: str, limit: Limit | None = None
) -> None:
    """Parts stacked over a row of stops, each drawn as long as the next is not there; a part has one colour in the whole app."""
    totals = [sum(value for _, value in parts) for _, parts in stops]
    scale, suffix = scale_of(unit, numbers, max([*totals, limit.value if limit else 0]))
    names = in_order(name for _, parts in stops for name, _ in parts)
    data = []
    for place, (stop, parts) in enumerate(stops):
        found = dict(parts)
        base = 0.0
        for name in names:
            top = base + found.get(name, 0) / scale
            shown = f"{name}: {numbers.show(found.get(name, 0), unit)} of {numbers.show(totals[place], unit)}"
            data.append(
                {"at": place, "end": place + 1, "stop": stop, "part": name, "low": base, "high": top, "shown": shown}
            )
            base = top
    axis = {"labelExpr": f"datum.label + '{suffix}'", "tickCount": 6}
    spec = {
        "height": _TALL,
        "layer": [
            {
                "mark": {"type": "rect", "strokeWidth": 0},
                "encoding": {
                    "x": {"field": "at", "type": "quantitative", "title": None, "axis": None,
                          "scale": {"domain": [0, len(stops)], "nice": False}},
                    "x2": {"field": "end"},
                    "y": {"field": "low", "type": "quantitative", "title": None, "axis": axis},
                    "y2": {"field": "high"},
                    "color": {"field": "part", "type": "nominal", "sort": None, "legend": None,
                              "scale": {"domain": names, "range": [colour_of(name) for name in names]}},
                    "tooltip": [{"field": "stop"}, {"field": "shown"}],
                },
            },
            *_level(limit, unit, numbers, scale),
        ],
    }  # fmt: skip
    draw(data, spec, key, said)
    legend((name, colour_of(name), "") for name in names)


def as_csv(lines: Sequence[Curve], x: str, unit: str) -> str:
    """One row a value of x, one column a line; empty where there is no answer."""
    found = [dict(line.points) for line in lines]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([x, *(f"{line.name} ({unit})" if unit else line.name for line in lines)])
    for at in sorted({at for points in found for at in points}):
        values = (points.get(at) for points in found)
        rows.writerow(
            [
                f"{at:.15g}",
                *("" if value is None else str(int(value)) if value == int(value) else repr(value) for value in values),
            ]
        )
    return text.getvalue()


def _level(limit: Limit | None, unit: str, numbers: Numbers, scale: int) -> list[dict[str, Any]]:
    if limit is None:
        return []
    at = {"y": {"datum": limit.value / scale}}
    text = f"{limit.name}: {numbers.show(limit.value, unit)}"
    return [
        {"data": _ONCE, "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 2, "color": RED}, "encoding": at},
        {
            "data": _ONCE,
            "mark": {"type": "text", "text": text, "x": 6, "dy": -8, "align": "left", "color": RED},
            "encoding": at,
        },
    ]


def _mark_now(now: float | None) -> list[dict[str, Any]]:
    if now is None:
        return []
    return [
        {
            "data": _ONCE,
            "mark": {"type": "rule", "strokeWidth": 1.5, "color": "#7b8794", "strokeDash": [2, 3]},
            "encoding": {"x": {"datum": now}},
        }
    ]
