"""A Gantt chart of a pipeline's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import streamlit as st

from calc.pipeline import Event
from pages.ui.charts.drawing import draw, legend

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
    draw(data, spec, key, said)
    legend((*_OPERATIONS[kind], "") for kind in kinds)
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
            "color": {"field": "kind", "type": "nominal", "scale": colours, "legend": None},
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
