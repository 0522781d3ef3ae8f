"""What is in a model: every parameter, by component."""

from calc.commands import COMMANDS
from pages.ui import parts
from pages.ui.answers import parameters
from pages.ui.page import Question, show

TITLE, HEADING, ICON = "Model", "Model: what is in it?", ":material/account_tree:"
PLANS = (COMMANDS["params"].plan,)

QUESTION = Question(
    command="params",
    sliders=("lora_rank", "lora_targets"),
    figures=parameters.figures_of,
    picture=parameters.treemap,
    bar=lambda answer: parts.by_role(answer.breakdown),
    tabs={
        "All and active": parameters.total_against_active,
        "Textbook form": parameters.textbook,
        "Hub page": parameters.hub_page,
    },
)


def render() -> None:
    show(QUESTION)


if __name__ == "__main__":
    from app import main

    main()
