"""How many FLOPs training takes, and how long."""

from calc.compute import ComputeAnswer, ComputePlan
from pages.ui import charts
from pages.ui.page import Question, show
from pages.ui.views import Metric, Numbers, parts

TITLE, ICON = "Compute", ":material/speed:"
PLANS = (ComputePlan,)


def headline(answer: ComputeAnswer, numbers: Numbers) -> list[Metric]:
    causal, full = answer.causal, answer.full
    return [
        Metric(
            "Training, causal",
            numbers.show(causal.training_flops, "FLOPs"),
            f"{causal.training_flops:,} FLOPs, on {answer.tokens:,} tokens",
        ),
        Metric(
            "Training, full",
            numbers.show(full.training_flops, "FLOPs"),
            f"{full.training_flops:,} FLOPs: the PaLM convention",
        ),
        Metric(
            "6ND",
            numbers.show(causal.six_nd_flops, "FLOPs"),
            f"{causal.six_nd_flops:,} FLOPs: 6 · {answer.active_parameters:,} · {answer.tokens:,}",
        ),
        Metric("Time", numbers.show(causal.seconds, "seconds"), "Causal FLOPs over GPUs · dense peak · MFU"),
        Metric("GPU-hours", numbers.count(causal.gpu_hours)),
        Metric(
            "Energy",
            numbers.show(causal.energy_kwh, "kWh"),
            f"{numbers.count(causal.energy_kwh, ' kWh')}: GPU-hours · board power · share drawn · PUE",
        ),
        Metric(
            "MFU",
            numbers.percent(causal.mfu),
            f"{numbers.percent(answer.six_nd_mfu)} if 6ND is what is counted; HFU {numbers.percent(causal.hfu)}",
        ),
        Metric(
            "Cost", numbers.count(causal.cost), "In the currency of the price; set the price of a GPU-hour to see it"
        ),
    ]


def _charts(answer: ComputeAnswer, numbers: Numbers, key: str) -> None:
    rows: charts.Rows = {
        "causal": parts(answer.causal.breakdown),
        "full": parts(answer.full.breakdown),
        "6ND": [("6ND", answer.causal.six_nd_flops)],
    }
    charts.stacked(rows, "FLOPs", numbers, f"{key}stacked")


QUESTION = Question(
    command="compute",
    intro="FLOPs of training, exact for causal and for full attention, with the 6ND estimate; and the time, cost and energy they take.",
    groups={
        "": ("seq", "tokens", "gpus", "mfu"),
        "Precision and recomputation": ("dtype", "recompute", "gpu_hours"),
        "Price, power and carbon": ("price_per_gpu_hour", "power_utilization", "pue", "grid_intensity"),
    },
    headline=headline,
    charts=_charts,
)


def render() -> None:
    show(QUESTION)


if __name__ == "__main__":
    from app import main

    main()
