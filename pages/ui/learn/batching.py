"""Static and continuous batching."""

from __future__ import annotations

import streamlit as st

from calc.learn.batching import SOURCE, Batching, BatchingPlan, continuous, static
from pages.ui import charts, scenario, widgets
from pages.ui.charts import Bar
from pages.ui.numbers import Figure, Numbers, figures


def show(numbers: Numbers) -> None:
    """The same requests both ways, slot by slot."""
    widgets.ask_row(BatchingPlan, list(BatchingPlan.model_fields))
    plan = scenario.current().of(BatchingPlan)
    ways = {"static": static(plan), "continuous": continuous(plan)}
    figures(
        [
            Figure(f"Steps, {name}", f"{each.steps:,}", f"{numbers.percent(each.used)} of slots busy")
            for name, each in ways.items()
        ]
    )
    for name, each in ways.items():
        charts.title(
            f"{name.capitalize()}: {each.steps:,} steps, {numbers.percent(each.used)} of the slots make a token"
        )
        charts.lanes(
            _bars(each), "steps", f"batching {name}", f"{name}: requests by slot over {each.steps} steps", legend=False
        )
    st.latex(
        r"\begin{gathered} "
        r"\text{static} = \sum_{\text{batches}} \max_i \ell_i \\ "
        r"\text{busy} = \frac{\sum_i \ell_i}{\text{slots} \cdot \text{steps}} "
        r"\end{gathered}"
    )
    st.caption(f"Source: {SOURCE}. A prompt takes no step here.")


def _bars(found: Batching) -> list[Bar]:
    return [
        Bar(
            f"slot {turn.slot + 1}",
            turn.start,
            turn.end,
            str(turn.request + 1),
            str(turn.request % 10),
            f"request {turn.request + 1}: steps {turn.start + 1} to {turn.end}",
        )
        for turn in found.turns
    ]
