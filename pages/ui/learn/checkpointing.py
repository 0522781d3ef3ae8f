"""Gradient checkpointing on a chain of layers."""

from __future__ import annotations

import streamlit as st

from calc.learn.checkpointing import SOURCE, CheckpointingPlan, best_distance, checkpoints, every_distance
from pages.ui import charts, scenario, widgets
from pages.ui.charts import Curve
from pages.ui.numbers import Figure, Numbers, figures


def show(numbers: Numbers) -> None:
    """The chosen distance, the best one, and the curve of both costs."""
    widgets.ask_row(CheckpointingPlan, list(CheckpointingPlan.model_fields))
    plan = scenario.current().of(CheckpointingPlan)
    now, best = checkpoints(plan), best_distance(plan.chain_layers)
    figures(
        [
            Figure("Kept after forward", f"{now.kept:,}", "inputs of layers"),
            Figure(
                "Alive at most", f"{now.peak:,}", f"in the backward pass; {plan.chain_layers:,} without checkpoints"
            ),
            Figure(
                "Computed again", numbers.percent(now.extra), f"{now.recomputed:,} layers, a share of a forward pass"
            ),
            Figure(
                "Best distance", f"{best.every:,}", f"{best.peak:,} alive at most, {numbers.percent(best.extra)} again"
            ),
        ]
    )
    found = every_distance(plan.chain_layers)[:: max(1, plan.chain_layers // 400)]
    lines = [
        Curve("inputs alive at most", [(each.every, each.peak) for each in found]),
        Curve("layers computed again", [(each.every, each.recomputed) for each in found]),
    ]
    charts.title("Against the distance between checkpoints")
    said = f"Of {plan.chain_layers} layers the fewest inputs alive are {best.peak}, at every {best.every}th layer"
    charts.curves(
        lines, "layers between checkpoints", "", numbers, "checkpoint distance", said, now=now.every, log=False
    )
    st.latex(r"\text{alive} \approx \frac{n}{k} + k - 1 \;\ge\; 2 \sqrt{n} - 1 \quad \text{at } k = \sqrt{n}")
    st.caption(
        f"Source: {SOURCE}. Layers of one size; a real layer also keeps what lies within it while it is run again."
    )
