"""Training states: the copies of a parameter, and the ranks that share them."""

from __future__ import annotations

import streamlit as st

from calc.learn.zero_stages import OFFLOAD_SOURCE, SOURCE, RankStates, ZeroStagesPlan, bytes_a_parameter, zero_stages
from calc.training.states.recipes import RECIPES
from pages.ui import charts, scenario, widgets
from pages.ui.numbers import Numbers
from pages.ui.parts import Parts, ordered, spaced


def show(numbers: Numbers) -> None:
    """Bytes a parameter by recipe, then a device of each stage with what it sends."""
    widgets.ask_row(ZeroStagesPlan, list(ZeroStagesPlan.model_fields))
    plan = scenario.current().of(ZeroStagesPlan)
    kept = bytes_a_parameter(plan.ledger)
    charts.title("Bytes of one parameter")
    rows: dict[str, Parts] = {plan.ledger: [(spaced(name), size) for name, size in kept.items()]}
    said = f"One parameter takes {sum(kept.values())} bytes: " + ", ".join(f"{spaced(n)} {b}" for n, b in kept.items())
    charts.stacked(rows, "bytes", numbers, "bytes a parameter", said)
    st.caption(f"Source: {RECIPES[plan.ledger].source}")
    stages = zero_stages(plan)
    charts.title(f"One of {plan.data_parallel_ranks:,} devices")
    bars = {stage.name: _parts(stage) for stage in stages}
    charts.stacked(bars, "bytes", numbers, "zero stages", "; ".join(_said(stage, numbers) for stage in stages))
    st.dataframe(
        {
            "Stage": [stage.name for stage in stages],
            "On a device": [numbers.show(stage.device) for stage in stages],
            "On its host": [numbers.show(stage.host) if stage.host else "" for stage in stages],
            "Sent by a rank a step": [numbers.show(stage.sent) for stage in stages],
        },
        hide_index=True,
    )
    st.latex(
        r"\text{device} = \sum_{\text{states}} \frac{\text{bytes} \cdot N}{n \text{ if the stage shards it, else } 1}"
    )
    st.caption(f"Source: {SOURCE}; offload: {OFFLOAD_SOURCE}. States alone: activations and buffers come on top.")


def _parts(stage: RankStates) -> Parts:
    return ordered([("weights", stage.weights), ("gradients", stage.gradients), ("optimizer states", stage.optimizer)])


def _said(stage: RankStates, numbers: Numbers) -> str:
    host = f", {numbers.show(stage.host)} on the host" if stage.host else ""
    return f"{stage.name}: {numbers.show(stage.device)} on a device{host}, {numbers.show(stage.sent)} sent a step"
