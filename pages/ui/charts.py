"""Charts in Vega-Lite, which Streamlit redraws in place; its theme gives them their colours, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import streamlit as st

from calc.pipeline import Event
from calc.units import axis_of_bytes
from pages.ui.views import Numbers

_ROW = 46  # pixels of a bar with its gap
_RED = "#d0553f"  # reads on light and dark
_LEGEND = {
    "orient": "bottom",
    "title": None,
    "labelLimit": 250,
    "columns": {"expr": "max(1, floor(width / 200))"},
    "symbolType": "square",
}

Rows = Mapping[str, Sequence[tuple[str, float]]]


def title(text: str) -> None:
    """The line above a chart."""
    st.markdown(f"**{text}**")


def stacked(rows: Rows, unit: str, numbers: Numbers, key: str, limit: tuple[str, float] | None = None) -> None:
    """A stacked bar for each row, of named parts; a part has one colour in all. `limit` is a line across: its name and value."""
    most = max(sum(value for _, value in parts) for parts in rows.values())
    scale, suffix = _scale(unit, numbers, max(most, limit[1] if limit else 0))
    data = [segment for row, parts in rows.items() for segment in _segments(row, parts, unit, numbers, scale)]
    spec = {
        "height": {"step": _ROW},
        "encoding": {
            "y": {"field": "row", "type": "nominal", "sort": None, "title": None, "axis": _names(len(rows) > 1)}
        },
        "layer": [_bars([segment["part"] for segment in data], suffix), *_limit(limit, unit, numbers, scale, most)],
    }
    st.vega_lite_chart(data, spec, key=key)


def _segments(
    row: str, parts: Sequence[tuple[str, float]], unit: str, numbers: Numbers, scale: int
) -> Iterator[dict[str, Any]]:
    end = 0.0
    for name, value in parts:
        start, end = end, end + value / scale
        yield {"row": row, "part": name, "start": start, "end": end, "shown": f"{name}: {numbers.show(value, unit)}"}


def _bars(names: Sequence[str], suffix: str) -> dict[str, Any]:
    parts = list(dict.fromkeys(names))
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
                "scale": {"domain": parts},
                "legend": _LEGEND if len(parts) > 1 else None,
            },
            "tooltip": {"field": "shown"},
        },
    }


def _limit(
    limit: tuple[str, float] | None, unit: str, numbers: Numbers, scale: int, most: float
) -> list[dict[str, Any]]:
    """A dashed line across all rows, with its name above; nothing where there is no limit. `most` is the longest row."""
    if limit is None:
        return []
    name, value = limit
    once: dict[str, Any] = {"values": [{}]}
    at: dict[str, Any] = {"x": {"datum": value / scale}, "y": None}
    text = {
        "type": "text",
        "text": f"{name}: {numbers.show(value, unit)}",
        "y": -9,
        "align": "right" if 2 * value > most else "left",  # towards the room that there is
        "color": _RED,
    }
    return [
        {"data": once, "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 2, "color": _RED}, "encoding": at},
        {"data": once, "mark": text, "encoding": at},
    ]


def _names(shown: bool) -> dict[str, Any] | None:
    return {"labelLimit": 120, "ticks": False, "domain": False} if shown else None


# the letters that a chart's axis takes for powers of 1000, by unit
_LETTERS = {"FLOPs": ("", "k", "M", "G", "T", "P", "E", "Z", "Y"), "parameters": ("", "K", "M", "B", "T", "Q")}


def _scale(unit: str, numbers: Numbers, most: float) -> tuple[int, str]:
    """What an axis divides by, and what it then writes after each number."""
    if unit == "bytes":
        size, name = axis_of_bytes(most, numbers.units == "GiB")
        return size, f" {name}"
    letters = _LETTERS.get(unit, ("",))
    power = next((power for power in range(len(letters) - 1, 0, -1) if most >= 1000**power), 0)
    return 1000**power, f" {letters[power]}{'FLOP' if unit == 'FLOPs' else ''}"


# the kinds of a timeline: name and colour
_KINDS = {
    "F": ("forward", "#3b7dc0"),
    "B": ("backward", "#dd9631"),
    "I": ("input gradient", "#dd9631"),
    "W": ("weight gradient", "#35a184"),
}
_MOST = 4096  # operations that a browser draws without a pause
_FEW = 256  # operations whose numbers can be read in their bars


def timeline(events: Sequence[Event], stages: int, makespan: float, key: str) -> None:
    """A Gantt chart: one lane a stage, one bar an operation, coloured by its kind. It ends where the drawn ones end."""
    drawn = sorted(events, key=lambda event: event.start)[:_MOST]
    end = makespan if len(drawn) == len(events) else max(event.end for event in drawn)
    kinds = [kind for kind in _KINDS if any(event.kind == kind for event in drawn)]
    data = [
        {
            "stage": event.stage,
            "kind": _KINDS[event.kind][0],
            "start": event.start,
            "end": event.end,
            "microbatch": event.microbatch,
            "chunk": event.chunk,
        }
        for event in drawn
    ]
    time = {
        "field": "start",
        "type": "quantitative",
        "title": "seconds",
        "scale": {"domain": [0, end], "nice": False},
    }
    spec = {
        "height": {"step": max(14, min(34, 640 // stages))},
        "encoding": {
            "y": {"field": "stage", "type": "ordinal", "title": "stage", "axis": {"ticks": False, "domain": False}},
            "x": time,
            "x2": {"field": "end"},
        },
        "layer": [_operations(kinds), *([_numbers()] if len(drawn) <= _FEW else [])],
    }
    st.vega_lite_chart(data, spec, key=key)
    if len(drawn) < len(events):
        st.caption(
            f"Only the first {len(drawn):,} of {len(events):,} operations are drawn, up to {end:,.6g} of {makespan:,.6g} s; the "
            "rest is left out. The figures count all of them, and the JSON has all."
        )


def _operations(kinds: Sequence[str]) -> dict[str, Any]:
    colours = {"domain": [_KINDS[kind][0] for kind in kinds], "range": [_KINDS[kind][1] for kind in kinds]}
    return {
        "mark": {"type": "bar", "height": {"band": 0.86}},
        "encoding": {
            "color": {"field": "kind", "type": "nominal", "scale": colours, "legend": _LEGEND},
            "tooltip": [{"field": name} for name in ("kind", "stage", "microbatch", "chunk", "start", "end")],
        },
    }


def _numbers() -> dict[str, Any]:
    """The micro-batch in each bar."""
    return {
        "transform": [{"calculate": "(datum.start + datum.end) / 2", "as": "middle"}],
        "mark": {"type": "text", "fontSize": 11, "color": "white"},
        "encoding": {"x": {"field": "middle", "type": "quantitative"}, "x2": None, "text": {"field": "microbatch"}},
    }
