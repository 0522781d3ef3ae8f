"""Charts in Vega-Lite, which Streamlit redraws in place. Each has a description for those who do not see it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import streamlit as st

from calc.pipeline import Event
from calc.units import axis_of_bytes
from pages.ui.numbers import Numbers
from pages.ui.parts import COLOURS, FREE, Parts

_ROW: Final = 46  # pixels of a bar with its gap
_RED: Final = "#d0553f"  # reads on light and dark
OTHERS: Final = (
    "#3b76b8",
    "#d98c1f",
    "#2f9477",
    "#b8568a",
    "#7d9ad6",
    "#9a7b3c",
    "#c8553d",
    "#7b8794",
    "#5aa7c7",
    "#9a6fc4",
)
_LEGEND: Final = {
    "orient": "bottom",
    "title": None,
    "labelLimit": 260,
    "columns": {"expr": "max(1, floor(width / 230))"},
    "symbolType": "square",
}
_TALL: Final = 280  # pixels of a curve
# the numbers along a logarithmic axis, as people say them
_TENS: Final = "datum.label ? replace(format(datum.value, '~s'), 'G', 'B') : ''"
_TWOS: Final = (
    "datum.value >= 1048576 ? format(datum.value / 1048576, '~r') + 'M' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '.3~r') + 'k' : datum.label"
)


@dataclass(frozen=True, slots=True)
class Limit:
    """A value that rows are held against: its name and amount."""

    name: str
    value: float


def _draw(data: Any, spec: dict[str, Any], key: str, said: str, **options: Any) -> Any:
    """A chart with text that is dark enough on the theme in use."""
    ink = "#c3ccd7" if st.context.theme.type == "dark" else "#46505c"
    axis = {"labelColor": ink, "titleColor": ink}
    config = {"axis": axis, "axisX": axis, "axisY": axis, "legend": {"labelColor": ink}}
    return st.vega_lite_chart(data, {**spec, "config": config}, key=key, alt=said, **options)


def title(text: str) -> None:
    """The line above a chart."""
    st.markdown(f"**{text}**")


def stacked(
    rows: Mapping[str, Parts], unit: str, numbers: Numbers, key: str, said: str, limit: Limit | None = None
) -> None:
    """A stacked bar for each row, of named parts that sum to the row; a part has one colour in the whole app.

    `said` describes the chart. With a limit, a dashed line crosses all rows, and what is free up to it is drawn.
    """
    most = max(sum(value for _, value in parts) for parts in rows.values())
    scale, suffix = _scale(unit, numbers, max(most, limit.value if limit else 0))
    data = [
        segment
        for row, parts in rows.items()
        for segment in _segments(row, _with_free(parts, limit), unit, numbers, scale)
    ]
    spec = {
        "height": {"step": _ROW if len(rows) > 1 else 64},
        "encoding": {
            "y": {"field": "row", "type": "nominal", "sort": None, "title": None, "axis": _row_names(len(rows) > 1)}
        },
        "layer": [
            _bars([segment["part"] for segment in data], suffix),
            *_limit_line(limit, unit, numbers, scale, most),
        ],
    }
    _draw(data, spec, key, said)


def _with_free(parts: Parts, limit: Limit | None) -> Parts:
    room = limit.value - sum(value for _, value in parts) if limit else 0
    return [*parts, (FREE, room)] if room > 0 else parts


def _segments(row: str, parts: Parts, unit: str, numbers: Numbers, scale: int) -> Iterator[dict[str, Any]]:
    end = 0.0
    for name, value in parts:
        start, end = end, end + value / scale
        yield {"row": row, "part": name, "start": start, "end": end, "shown": f"{name}: {numbers.show(value, unit)}"}


def _bars(names: Sequence[str], suffix: str) -> dict[str, Any]:
    parts = [name for name in COLOURS if name in names]
    parts += [name for name in dict.fromkeys(names) if name not in COLOURS]
    colours = [COLOURS.get(name) or OTHERS[place % len(OTHERS)] for place, name in enumerate(parts)]
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
                "scale": {"domain": parts, "range": colours},
                "legend": _LEGEND if len(parts) > 1 else None,
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
        "align": "right" if 2 * limit.value > most else "left",  # towards the room that there is
        "color": _RED,
    }
    return [
        {"data": once, "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 2, "color": _RED}, "encoding": at},
        {"data": once, "mark": text, "encoding": at},
    ]


def _row_names(shown: bool) -> dict[str, Any] | None:
    return {"labelLimit": 220, "ticks": False, "domain": False} if shown else None


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) of one line; None where there is no answer."""

    name: str
    points: Sequence[tuple[float, float | None]]


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
) -> None:
    """Lines over x, of values of one unit. `limit` is a level across; `now` marks where the scenario stands; `steep` values have
    an axis of their own powers."""
    known = [(line.name, at, value) for line in lines for at, value in line.points if value is not None]
    if not known:
        st.info("No value of this field gives an answer.")
        return
    scale, suffix = _scale(unit, numbers, max(value for *_, value in known))
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
    spec = {
        "height": _TALL,
        "layer": [
            {
                "mark": {"type": "line", "point": True, "strokeWidth": 2.5},
                "encoding": {
                    "x": horizontal,
                    "y": {
                        "field": "y",
                        "type": "quantitative",
                        "title": None,
                        "scale": {"type": "log"} if steep else {},
                        "axis": {"labelExpr": f"datum.label ? datum.label + '{suffix}' : ''"},
                    },
                    "color": {
                        "field": "line",
                        "type": "nominal",
                        "sort": None,
                        "scale": {"domain": [line.name for line in lines], "range": list(OTHERS)},
                        "legend": _LEGEND if len(lines) > 1 else None,
                    },
                    "tooltip": [{"field": "line"}, {"field": "shown"}],
                },
            },
            *_level(limit, unit, numbers, scale),
            *_mark_now(now),
        ],
    }
    _draw(data, spec, key, said)
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
    once: dict[str, Any] = {"values": [{}]}
    at = {"y": {"datum": limit.value / scale}}
    text = f"{limit.name}: {numbers.show(limit.value, unit)}"
    return [
        {"data": once, "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 2, "color": _RED}, "encoding": at},
        {
            "data": once,
            "mark": {"type": "text", "text": text, "x": 6, "dy": -8, "align": "left", "color": _RED},
            "encoding": at,
        },
    ]


def _mark_now(now: float | None) -> list[dict[str, Any]]:
    if now is None:
        return []
    once: dict[str, Any] = {"values": [{}]}
    return [
        {
            "data": once,
            "mark": {"type": "rule", "strokeWidth": 1.5, "color": "#7b8794", "strokeDash": [2, 3]},
            "encoding": {"x": {"datum": now}},
        }
    ]


@dataclass(frozen=True, slots=True)
class Square:
    """One cell of a matrix: its row and column, what stands in it, its kind (one of KINDS), what a pointer shows."""

    row: str
    column: str
    text: str
    kind: str
    shown: str


KINDS: Final = {  # colours on which white text reads (4.5:1)
    "fits": "#1f7a60",
    "tight": "#96650a",
    "takes more GPUs": "#5d6c7e",
    "does not fit": "#b3432c",
    "unknown": "#6f6f6f",
}


def matrix(cells: Sequence[Square], key: str, said: str) -> tuple[str, str] | None:
    """Coloured cells with text; the row and column of the one that was clicked, None before."""
    kinds = [kind for kind in KINDS if any(cell.kind == kind for cell in cells)]
    data = [{"row": c.row, "column": c.column, "text": c.text, "kind": c.kind, "shown": c.shown} for c in cells]
    names = {"type": "nominal", "sort": None, "title": None}
    bare = {"domain": False, "ticks": False}
    heads = {**bare, "orient": "top", "labelAngle": 0, "labelLimit": 96, "labelExpr": "split(datum.label, '|')"}
    colours = {"domain": kinds, "range": [KINDS[kind] for kind in kinds]}
    spec = {
        "height": {"step": 38},
        "encoding": {
            "x": {"field": "column", **names, "axis": heads},
            "y": {"field": "row", **names, "axis": {**bare, "labelLimit": 230}},
            "tooltip": {"field": "shown"},
        },
        "layer": [
            {
                "params": [{"name": "cell", "select": {"type": "point", "fields": ["row", "column"], "toggle": False}}],
                "mark": {
                    "type": "rect",
                    "cornerRadius": 4,
                    "cursor": "pointer",
                    "height": {"band": 0.9},
                    "width": {"band": 0.94},
                },
                "encoding": {
                    "color": {"field": "kind", "type": "nominal", "scale": colours, "legend": {**_LEGEND, "columns": 0}}
                },
            },
            {
                "mark": {"type": "text", "fontSize": 12, "fontWeight": 600, "color": "white"},
                "encoding": {"text": {"field": "text"}},
            },
        ],
    }
    with st.container(key="matrix"):
        state = _draw(data, spec, key, said, on_select="rerun", selection_mode="cell")
    chosen = state["selection"].get("cell") if state else None
    return (chosen[0]["row"], chosen[0]["column"]) if chosen else None


# the letters that a chart's axis takes for powers of 1000, by unit
_LETTERS: Final = {
    "FLOPs": ("", "k", "M", "G", "T", "P", "E", "Z", "Y"),
    "parameters": ("", "K", "M", "B", "T", "Q"),
    "tokens/s": ("", "k", "M", "B"),
}


_LONG: Final = ((86400, "days"), (3600, "h"))  # what an axis of long times divides seconds by


def _scale(unit: str, numbers: Numbers, most: float) -> tuple[int, str]:
    """What an axis divides by, and what it then writes after each number."""
    if unit == "bytes":
        size, name = axis_of_bytes(most, numbers.units == "GiB")
        return size, f" {name}"
    if unit == "seconds":
        return next(((size, f" {name}") for size, name in _LONG if most >= 2 * size), (1, " s"))
    letters = _LETTERS.get(unit, ("",))
    power = next((power for power in range(len(letters) - 1, 0, -1) if most >= 1000**power), 0)
    return 1000**power, f" {letters[power]}{'FLOP' if unit == 'FLOPs' else ''}"


# the kinds of a timeline: name and colour
_OPERATIONS: Final = {
    "F": ("forward", "#3b7dc0"),
    "B": ("backward", "#dd9631"),
    "I": ("input gradient", "#dd9631"),
    "W": ("weight gradient", "#35a184"),
}
_MOST: Final = 4096  # operations that a browser draws without a pause
_FEW: Final = 256  # operations whose numbers can be read in their bars


def timeline(events: Sequence[Event], stages: int, makespan: float, key: str) -> None:
    """A Gantt chart: one lane a stage, one bar an operation, coloured by its kind. It ends where the drawn ones end."""
    drawn = sorted(events, key=lambda event: event.start)[:_MOST]
    end = makespan if len(drawn) == len(events) else max(event.end for event in drawn)
    kinds = [kind for kind in _OPERATIONS if any(event.kind == kind for event in drawn)]
    data = [
        {
            "stage": event.stage,
            "kind": _OPERATIONS[event.kind][0],
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
    said = f"Timeline of {len(drawn):,} operations on {stages:,} stages; the step ends at {makespan:,.6g} s"
    _draw(data, spec, key, said)
    if len(drawn) < len(events):
        st.caption(
            f"Only the first {len(drawn):,} of {len(events):,} operations are drawn, up to {end:,.6g} of {makespan:,.6g} s; the "
            "rest is left out. The figures count all of them, and the JSON has all."
        )


def _operations(kinds: Sequence[str]) -> dict[str, Any]:
    colours = {"domain": [_OPERATIONS[kind][0] for kind in kinds], "range": [_OPERATIONS[kind][1] for kind in kinds]}
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


@dataclass(frozen=True, slots=True)
class Bar:
    """A piece of a lane: from where to where, what stands in it, its kind (which gives the colour), what a pointer shows."""

    lane: str
    start: float
    end: float
    text: str
    kind: str
    shown: str


def lanes(bars: Sequence[Bar], x: str, key: str, said: str, *, legend: bool = True) -> None:
    """Lanes one below the other, of bars along one axis; each kind has a colour, which a legend explains."""
    kinds = list(dict.fromkeys(bar.kind for bar in bars))
    data = [
        {"lane": b.lane, "start": b.start, "end": b.end, "text": b.text, "kind": b.kind, "shown": b.shown} for b in bars
    ]
    colours = {"domain": kinds, "range": [OTHERS[place % len(OTHERS)] for place in range(len(kinds))]}
    spec = {
        "height": {"step": 34},
        "encoding": {
            "y": {"field": "lane", "type": "nominal", "sort": None, "title": None, "axis": _row_names(True)},
            "x": {"field": "start", "type": "quantitative", "title": x, "axis": {"tickMinStep": 1}},
            "x2": {"field": "end"},
            "tooltip": {"field": "shown"},
        },
        "layer": [
            {
                "mark": {"type": "bar", "height": {"band": 0.86}, "stroke": "white", "strokeWidth": 1},
                "encoding": {
                    "color": {
                        "field": "kind",
                        "type": "nominal",
                        "scale": colours,
                        "legend": _LEGEND if legend else None,
                    }
                },
            },
            {
                "transform": [{"calculate": "(datum.start + datum.end) / 2", "as": "middle"}],
                "mark": {"type": "text", "fontSize": 11, "color": "white"},
                "encoding": {
                    "x": {"field": "middle", "type": "quantitative"},
                    "x2": None,
                    "text": {"field": "text"},
                },
            },
        ],
    }
    _draw(data, spec, key, said)
