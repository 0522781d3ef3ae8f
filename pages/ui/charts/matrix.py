"""A matrix of coloured cells with text, of which one can be clicked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import streamlit as st

from pages.ui.charts.drawing import draw, legend


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
                "encoding": {"color": {"field": "kind", "type": "nominal", "scale": colours, "legend": None}},
            },
            {
                "mark": {"type": "text", "fontSize": 12, "fontWeight": 600, "color": "white"},
                "encoding": {"text": {"field": "text"}},
            },
        ],
    }
    with st.container(key="matrix"):
        state = draw(data, spec, key, said, on_select="rerun", selection_mode="cell")
    legend((kind, KINDS[kind], "") for kind in kinds)
    chosen = state["selection"].get("cell") if state else None
    return (chosen[0]["row"], chosen[0]["column"]) if chosen else None
