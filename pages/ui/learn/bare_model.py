"""A model from its sizes: parameters by component, each by its formula."""

from __future__ import annotations

import streamlit as st

from calc.model.bare import BareModelPlan, bare_model
from calc.parameters import parameters
from pages.ui import scenario, views, widgets
from pages.ui.answers.parameters import figures_of, total_against_active
from pages.ui.numbers import Numbers, figures


def show(numbers: Numbers) -> None:
    """The sizes, the parameters that follow, and the formula of each part with the reader's sizes put in."""
    widgets.ask_row(BareModelPlan, list(BareModelPlan.model_fields))
    asked = scenario.current()
    answer = parameters(bare_model(asked.of(BareModelPlan)))
    figures(figures_of(answer, numbers))
    total_against_active(answer, numbers, asked)
    st.markdown("**One part by its formula**")
    views.formulas(answer.breakdown, numbers)
    st.markdown("**All parts**")
    views.table(answer.breakdown, numbers)
