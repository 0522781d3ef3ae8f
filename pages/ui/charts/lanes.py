"""Lanes of bars along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pages.ui.charts.drawing import LINES, draw
from pages.ui.charts.drawing import legend as show_legend


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
    colours = {"domain": kinds, "range": [LINES[place % len(LINES)] for place in range(len(kinds))]}
    spec = {
        "height": {"step": 34},
        "encoding": {
            "y": {
                "field": "lane",
                "type": "nominal",
                "sort": None,
                "title": None,
                "axis": {"labelLimit": 220, "ticks": False, "domain": False},
            },
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
                        "legend": None,
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
    draw(data, spec, key, said)
    if legend:
        show_legend((kind, LINES[place % len(LINES)], "") for place, kind in enumerate(kinds))
