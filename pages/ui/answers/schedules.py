"""Views of a pipeline schedule: its timeline, its figures, the closed forms of the literature."""

from __future__ import annotations

import streamlit as st

from calc.errors import InputError, validated
from calc.pipeline import SCHEDULES, PipelineAnswer, PipelinePlan, simulate
from pages.ui import charts, views
from pages.ui.appearance import SCHEDULE_NAMES
from pages.ui.numbers import Figure, Numbers
from pages.ui.scenario import Scenario
from pages.ui.text import plain


def picture(answer: PipelineAnswer, numbers: Numbers, _: Scenario) -> None:
    """One step as it runs."""
    charts.timeline(answer.timeline, answer.plan.stages, answer.makespan, "timeline")


def figures_of(answer: PipelineAnswer, numbers: Numbers, _: Scenario | None = None) -> list[Figure]:
    """The four figures under the timeline."""
    return [
        Figure("Step time", numbers.show(answer.makespan, "seconds"),
               "From the first operation to the end of the last", answer.makespan, "seconds"),
        Figure("Utilisation", numbers.percent(answer.utilization), "Work over stages · step time", answer.utilization),
        Figure("Bubble fraction", numbers.percent(answer.bubble_fraction),
               f"The share of the step in which a stage waits, on average; {numbers.percent(answer.bubble_over_ideal)} of the "
               f"busiest stage's work; from a stage's first to its last operation {numbers.show(answer.span_bubble, 'seconds')}",
               answer.bubble_fraction),
        Figure("In flight, stage 0", f"{answer.in_flight[0]}",
               f"(micro-batch, chunk) pairs at the peak, by stage: {answer.in_flight}", answer.in_flight[0]),
    ]  # fmt: skip


def every_schedule(answer: PipelineAnswer, numbers: Numbers, _: Scenario) -> None:
    """All schedules at equal work: the same stages and micro-batches, the same time of one micro-batch through a rank's layers."""
    rows: dict[str, list[str]] = {"Schedule": [], "Step time": [], "Bubble fraction": [], "In flight, stage 0": []}
    plan, refused = answer.plan, []
    for name in SCHEDULES:
        chunks = plan.virtual_stages if name == plan.schedule else None
        try:
            found = simulate(validated(PipelinePlan, {**plan.model_dump(), "schedule": name, "virtual_stages": chunks}))
        except InputError as error:
            refused.append(f"{SCHEDULE_NAMES.get(name, name)}: {error}")
            continue
        at = ("→ " if name == plan.schedule else "") + SCHEDULE_NAMES.get(name, name)
        values = (
            at, numbers.show(found.makespan, "seconds"), numbers.percent(found.bubble_fraction),
            f"{found.in_flight[0]}" + (f", each 1/{found.plan.chunks} of a rank" if found.plan.chunks > 1 else ""),
        )  # fmt: skip
        for column, value in zip(rows.values(), values, strict=True):
            column.append(value)
    st.dataframe(
        rows, hide_index=True, alt="Every schedule with its step time, bubble fraction and micro-batches in flight"
    )
    st.caption(
        plain(" ".join(["The same work in each: a rank's layers take as long, in one chunk or in several.", *refused]))
    )


def closed_forms(answer: PipelineAnswer, numbers: Numbers, _: Scenario) -> None:
    """What the literature says in closed form, with each one's simulated value."""
    views.closed_forms([(form, answer.simulated(form.quantity)) for form in answer.closed_forms])
