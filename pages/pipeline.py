"""How busy a pipeline is, with its timeline."""

from calc.pipeline import PipelineAnswer, PipelinePlan
from pages.ui import charts
from pages.ui.page import Question, show
from pages.ui.views import Metric, Numbers, closed_forms

TITLE, ICON = "Pipeline", ":material/view_timeline:"
PLANS = (PipelinePlan,)


def headline(answer: PipelineAnswer, numbers: Numbers) -> list[Metric]:
    return [
        Metric("Utilisation", numbers.percent(answer.utilization), "Work over stages · makespan"),
        Metric(
            "Bubble",
            numbers.percent(answer.bubble_fraction),
            "The share of the makespan in which a stage waits, on average",
        ),
        Metric("Makespan", numbers.show(answer.makespan, "seconds"), "From the first operation to the end of the last"),
        Metric(
            "Bubble over ideal",
            numbers.percent(answer.bubble_over_ideal),
            "What the busiest stage waits, over its work",
        ),
        Metric(
            "Span bubble",
            numbers.show(answer.span_bubble, "seconds"),
            "The most that a stage waits between its own first and last operation",
        ),
        Metric(
            "In flight, stage 0",
            f"{answer.in_flight[0]}",
            f"(micro-batch, chunk) pairs held at the peak, by stage: {answer.in_flight}",
        ),
    ]


def _charts(answer: PipelineAnswer, numbers: Numbers, key: str) -> None:
    charts.timeline(answer.timeline, answer.plan.stages, answer.makespan, f"{key}timeline")
    closed_forms([(form, answer.simulated(form.quantity)) for form in answer.closed_forms])


QUESTION = Question(
    command="pipeline",
    intro="One training step of a pipeline, simulated operation by operation: how busy the stages are, where they wait, what they hold.",
    groups={
        "": ("schedule", "stages", "microbatches", "virtual_stages"),
        "Times of one micro-batch through a rank's layers": ("forward", "backward_input", "backward_weight", "send"),
    },
    headline=headline,
    charts=_charts,
)


def render() -> None:
    show(QUESTION)


if __name__ == "__main__":
    from app import main

    main()
