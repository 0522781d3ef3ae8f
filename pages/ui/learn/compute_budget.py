"""A compute budget by each scaling law."""

from __future__ import annotations

import streamlit as st

from calc.learn.compute_budget import SOURCE, ComputeBudgetPlan, above_best, compute_budget
from pages.ui import charts, scenario, widgets
from pages.ui.charts import Curve
from pages.ui.numbers import Numbers


def show(numbers: Numbers) -> None:
    """Size and tokens that each fit calls best, and the loss of other sizes at the same FLOPs."""
    widgets.ask_row(ComputeBudgetPlan, list(ComputeBudgetPlan.model_fields))
    plan = scenario.current().of(ComputeBudgetPlan)
    found = compute_budget(plan)
    st.dataframe(
        {
            "Fit": list(found),
            "Parameters": [numbers.count(each.params) for each in found.values()],
            "Tokens": [numbers.count(each.tokens) for each in found.values()],
            "Tokens a parameter": [f"{each.tokens / each.params:.3g}" for each in found.values()],
            "Loss (nats a token)": ["" if each.loss is None else f"{each.loss:.4f}" for each in found.values()],
            "Source": [each.fit.source for each in found.values()],
        },
        hide_index=True,
    )
    lines = [Curve(name, above_best(each)) for name, each in found.items() if each.loss is not None]
    charts.title("Loss above the best, of other sizes at the same FLOPs (nats a token)")
    said = "Loss above the best against the size; each curve touches 0 at the size that its fit calls best"
    charts.curves(lines, "parameters", "", numbers, "iso-FLOP", said)
    st.latex(
        r"\begin{gathered} "
        r"C = 6 N D \\ "
        r"L = E + \frac{A}{N^{\alpha}} + \frac{B}{D^{\beta}} "
        r"\end{gathered}"
    )
    st.caption(
        f"Source: {SOURCE}. The well-known 20 tokens a parameter come from approaches 1 and 2; the fit with the paper's rounded "
        "constants gives about 93 at 5.76e23 FLOPs, its re-fit 18."
    )
