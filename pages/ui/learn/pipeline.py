"""A pipeline's schedule as it runs."""

from __future__ import annotations

import streamlit as st

from calc.commands import COMMANDS
from calc.pipeline import PipelineAnswer
from pages.ui import charts, scenario, widgets
from pages.ui.answers import schedules
from pages.ui.numbers import Numbers, figures


def show(numbers: Numbers) -> None:
    """Stages over time, and the bubble."""
    command = COMMANDS["pipeline"]
    widgets.ask_row(command.plan, ("schedule", "stages", "microbatches", "virtual_stages"))
    asked = scenario.current()
    answer = command.answer(asked.of(command.plan))
    assert isinstance(answer, PipelineAnswer)
    figures(schedules.figures_of(answer, numbers))
    charts.title("Stages over time")
    schedules.picture(answer, numbers, asked)
    st.latex(r"\text{busy} = \frac{m}{m + p - 1} \quad \text{for GPipe and 1F1B with equal stages}")
    schedules.closed_forms(answer, numbers, asked)
