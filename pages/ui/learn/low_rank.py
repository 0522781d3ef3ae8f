"""LoRA's two thin matrices."""

from __future__ import annotations

import streamlit as st

from calc.errors import InputError
from calc.learn.low_rank import LowRankPlan, adapter, frozen
from pages.ui import charts, scenario, views, widgets
from pages.ui.charts import Curve
from pages.ui.numbers import Figure, Numbers, figures


def show(numbers: Numbers) -> None:
    """The adapter's parameters by formula, and its share against the rank."""
    widgets.ask_row(LowRankPlan, list(LowRankPlan.model_fields))
    plan = scenario.current().of(LowRankPlan)
    found, whole = adapter(plan), frozen(plan)
    figures(
        [
            Figure("Adapter", f"{found.total:,}", "parameters that are trained"),
            Figure("Weight", f"{whole:,}", "parameters that stay as they are"),
            Figure("Share", f"{found.total / whole:.2%}", "trained of the weight's own"),
        ]
    )
    views.formulas(found, numbers)
    points = [(rank, _total(plan, rank)) for rank in (1 << place for place in range(13))]
    line = Curve("adapter", points)
    charts.title("Parameters against the rank")
    said = f"The adapter grows with the rank; at {plan.adapter_rank} it has {found.total} parameters"
    charts.curves([line], "rank", "parameters", numbers, "adapter rank", said, now=plan.adapter_rank)
    st.caption(
        "Gradients and optimizer states shrink with the trained share. Activations do not: the frozen layers' inputs are still needed."
    )


def _total(plan: LowRankPlan, rank: int) -> float | None:
    try:
        return adapter(plan.model_copy(update={"adapter_rank": rank})).total
    except InputError:  # a rank above the matrix's own
        return None
