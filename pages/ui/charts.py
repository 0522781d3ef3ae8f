"""Charts by plotly; Streamlit's theme gives them its colours, light and dark."""

from __future__ import annotations

import plotly.graph_objects as go
import streamlit as st

from calc.breakdown import Breakdown
from pages.ui.views import Numbers, parts

_CONFIG = {"displayModeBar": False}


def stacked(breakdown: Breakdown, numbers: Numbers, key: str) -> None:
    """One bar of a breakdown's largest parts."""
    bars = [
        go.Bar(
            x=[value],
            y=[""],
            name=name,
            orientation="h",
            hovertemplate=f"{name}: {numbers.show(value, breakdown.unit)}<extra></extra>",
        )
        for name, value in parts(breakdown)
    ]
    figure = go.Figure(bars)
    figure.update_layout(
        barmode="stack",
        height=220,
        margin={"l": 0, "r": 0, "t": 8, "b": 8},
        legend={"orientation": "h", "traceorder": "normal", "y": -0.3},
        xaxis={"exponentformat": "B", "tickformat": "~s", "nticks": 6},
        bargap=0,
    )
    st.plotly_chart(figure, key=key, config=_CONFIG)
