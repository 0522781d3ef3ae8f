"""How many parameters a model has, by component."""

from calc.parameters import ParameterAnswer, ParametersPlan
from pages.ui import parameter_views
from pages.ui.page import Question, show
from pages.ui.views import Metric, Numbers

TITLE, ICON = "Parameters", ":material/account_tree:"
PLANS = (ParametersPlan,)


def headline(answer: ParameterAnswer, numbers: Numbers) -> list[Metric]:
    total, active, embedding, trainable = answer.total, answer.active, answer.embedding, answer.trainable
    return [
        Metric("Parameters", numbers.show(total, "parameters"), f"{total:,}"),
        Metric(
            "Active for a token",
            numbers.show(active, "parameters"),
            f"{active:,}: all but the experts it is not sent to",
        ),
        Metric("Embedding", numbers.show(embedding, "parameters"), f"{embedding:,} in the embedding tables"),
        Metric(
            "Trainable",
            numbers.show(trainable, "parameters"),
            f"{trainable:,}: the adapters where LoRA is on, else all",
        ),
    ]


QUESTION = Question(
    command="params",
    intro="Every parameter of the model, counted exactly from its config, by component.",
    groups={"": ("lora_rank", "lora_targets")},
    headline=headline,
    charts=parameter_views.total_against_active,
    table_chart=parameter_views.treemap,
    after_table=parameter_views.beside_others,
)


def render() -> None:
    show(QUESTION)


if __name__ == "__main__":
    from app import main

    main()
