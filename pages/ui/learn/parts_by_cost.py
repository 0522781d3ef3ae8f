"""Norms, activations and position encodings by what they cost."""

from __future__ import annotations

import streamlit as st

from calc.learn.parts_by_cost import PartsByCostPlan, parts_by_cost
from pages.ui import scenario, widgets
from pages.ui.numbers import Numbers


def show(numbers: Numbers) -> None:
    """One table: the choices, their parameters and FLOPs."""
    widgets.ask_row(PartsByCostPlan, list(PartsByCostPlan.model_fields))
    found = parts_by_cost(scenario.current().of(PartsByCostPlan))
    st.dataframe(
        {
            "Kind": [each.kind for each in found],
            "Choice": [each.name for each in found],
            "Parameters": [f"{each.parameters:,}" for each in found],
            "By formula": [each.formula for each in found],
            "FLOPs a token": [f"{each.flops:,}" if each.flops else "" for each in found],
            "What it does": [each.note for each in found],
            "Source": [each.source for each in found],
        },
        hide_index=True,
    )
    st.latex(r"\text{FLOPs a token} = 2 \cdot \text{parameters of its matrices}")
    st.caption(
        "Matrix FLOPs of the forward pass. Norms and activations are bound by memory: they read and write each number."
    )
