"""Views of a pipeline schedule: its timeline, its figures, the closed forms of the literature."""

from __future__ import annotations

from calc.pipeline import PipelineAnswer
from pages.ui import charts, views
from pages.ui.numbers import Figure, Numbers
from pages.ui.scenario import Scenario


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


def closed_forms(answer: PipelineAnswer, numbers: Numbers, _: Scenario) -> None:
    """What the literature says in closed form, with each one's simulated value."""
    views.closed_forms([(form, answer.simulated(form.quantity)) for form in answer.closed_forms])
