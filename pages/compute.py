"""How many FLOPs training takes, how many days, and what they cost."""

from calc.commands import COMMANDS
from pages.ui.answers import cluster
from pages.ui.page import Question, show

TITLE, HEADING, ICON = "Cluster", "Cluster: how many days, how much money?", ":material/speed:"
PLANS = (COMMANDS["compute"].plan,)

QUESTION = Question(
    command="compute",
    levers=("dtype", "recompute"),
    sliders=("tokens", "gpus", "seq"),
    groups={
        "A given MFU, or a run that is known": ("mfu", "gpu_hours"),
        "Price, power and carbon": ("price_per_gpu_hour", "power_utilization", "pue", "grid_intensity"),
    },
    figures=cluster.figures_of,
    picture=cluster.picture,
    tabs={
        "Days against GPUs": cluster.against_gpus,
        "Layout finder": cluster.layouts,
        "FLOPs": cluster.conventions,
        "Given MFU": cluster.given_mfu,
    },
)


def render() -> None:
    show(QUESTION)


if __name__ == "__main__":
    from app import main

    main()
