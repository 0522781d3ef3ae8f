"""Views of a training run on many GPUs: days, cost, energy, FLOPs by convention."""

from __future__ import annotations

from calc.compute import ComputeAnswer
from pages.ui import charts, parts
from pages.ui.charts import Curve
from pages.ui.numbers import Figure, Numbers
from pages.ui.scenario import Scenario

_COUNTS = tuple(1 << place for place in range(15))


def picture(answer: ComputeAnswer, numbers: Numbers, _: Scenario) -> None:
    """Training FLOPs by operation."""
    rows = {"training": parts.top(answer.causal.breakdown)}
    charts.stacked(rows, "FLOPs", numbers, "flops bar", "Training FLOPs by operation")


def figures_of(answer: ComputeAnswer, numbers: Numbers) -> list[Figure]:
    """The four figures under the bar."""
    causal = answer.causal
    return [
        Figure("Time", numbers.show(causal.seconds, "seconds"),
               "Model FLOPs (causal) over GPUs · dense peak · MFU", causal.seconds),
        Figure("GPU-hours", numbers.count(causal.gpu_hours), "", causal.gpu_hours),
        Figure("Cost", numbers.count(causal.cost),
               "In the currency of the price; set the price of a GPU-hour in the sidebar to see it", causal.cost),
        Figure("Energy", numbers.show(causal.energy_kwh, "kWh"),
               f"{numbers.count(causal.energy_kwh, ' kWh')}: GPU-hours · board power · share drawn · PUE", causal.energy_kwh),
    ]  # fmt: skip


def against_gpus(answer: ComputeAnswer, numbers: Numbers, _: Scenario) -> None:
    """Days against the number of GPUs, at the same MFU."""
    seconds = answer.causal.seconds
    if seconds is None:
        charts.title("Choose a GPU and a number of tokens to see the time.")
        return
    work = seconds * answer.plan.gpus
    charts.title("Days against GPUs, at the same MFU: communication and the bubble are in the MFU, not worked out here")
    charts.curves(
        [Curve("days", [(float(count), work / count / 86400) for count in _COUNTS])], "GPUs", "days", numbers,
        "days against gpus", "Days of training against the number of GPUs", now=float(answer.plan.gpus),
    )  # fmt: skip


def conventions(answer: ComputeAnswer, numbers: Numbers, _: Scenario) -> None:
    """The same training by three conventions of counting."""
    causal, full = answer.causal, answer.full
    rows = {
        "model FLOPs (causal)": parts.top(causal.breakdown),
        "model FLOPs (full attention)": parts.top(full.breakdown),
        "6ND estimate": [("6ND estimate", float(causal.six_nd_flops))],
    }
    charts.stacked(rows, "FLOPs", numbers, "conventions", "Training FLOPs by three conventions")
    charts.title(
        f"MFU {numbers.percent(causal.mfu)}; {numbers.percent(answer.six_nd_mfu)} where 6ND is what is counted; "
        f"HFU {numbers.percent(causal.hfu)}"
    )
