"""How busy a pipeline is, with its timeline."""

from calc.commands import COMMANDS
from pages.ui.answers import schedules
from pages.ui.page import Question, show

TITLE, HEADING, ICON = "Schedules", "Schedules: how busy is a pipeline?", ":material/view_timeline:"
PLANS = (COMMANDS["pipeline"].plan,)

QUESTION = Question(
    command="pipeline",
    levers=("schedule",),
    sliders=("stages", "microbatches", "virtual_stages"),
    groups={
        "Times of one micro-batch through a rank's layers": ("forward", "backward_input", "backward_weight", "send")
    },
    figures=schedules.figures_of,
    picture=schedules.picture,
    tabs={"Every schedule": schedules.every_schedule, "Closed forms": schedules.closed_forms},
)


def render() -> None:
    show(QUESTION)


if __name__ == "__main__":
    from app import main

    main()
