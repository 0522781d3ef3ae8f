"""Price, energy, carbon, failures and checkpoints of a run whose step time is known."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Final

from calc.hardware import Gpu
from calc.step_time.plan import TimePlan

# US dollars a GPU-hour on demand, by public price lists of single providers; a reader's own price takes their place
_SPHERON: Final = "Spheron, on demand, 17 March 2026 (its article on H200, B200 and GB200)"
_TECHBYTES: Final = "{} on demand, 7 May 2026 (techbytes.app, serverless GPU pricing matrix)"
_LAMBDA: Final = _TECHBYTES.format("Lambda,")
_MODAL: Final = _TECHBYTES.format("Modal,")
_PRICES: Final = (
    ("gb200", 4.54, f"{_SPHERON}: half of 9.08 for a superchip of two"),
    ("b200", 6.03, _SPHERON),
    ("h200", 4.54, _SPHERON),
    ("h100-sxm", 3.78, _LAMBDA),
    ("h100-pcie", 2.86, _LAMBDA),
    ("a100-sxm-80gb", 2.4984, _MODAL),
    ("a100-sxm-40gb", 1.48, _LAMBDA),
    ("l40s", 1.9512, _MODAL),
    ("l4-", 0.7992, _MODAL),
    ("t4-", 0.5904, _MODAL),
    ("a10-", 0.86, _LAMBDA),
)


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars a GPU-hour and where they are from; None where nobody says."""

    dollars: float | None
    source: str


def price_of(gpu: Gpu, given: float | None) -> Price:
    """The user's price of a GPU-hour (0: the GPUs are paid for), or a public one."""
    if given is not None:
        return Price(given, "given")
    for name, dollars, source in _PRICES:
        if gpu.name.startswith(name):
            return Price(dollars, source)
    return Price(None, f"no price of {gpu.name} is known: --price-per-gpu-hour gives one")


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run. `checkpoint_seconds` is what writing one takes, `interval_seconds` the best time between two, `useful` the
    share of the time that is neither written, lost nor repeated (1 where nothing fails)."""

    seconds: float
    gpu_hours: float
    cost: float | None
    energy_kwh: float | None
    carbon_kg: float | None
    failures: float
    checkpoint_seconds: float
    interval_seconds: float
    useful: float


def run_of(plan: TimePlan, gpu: Gpu, step_seconds: float, state_bytes: float, price: Price) -> Run:
    """Time, money and energy of `plan.tokens` (or of one step). `state_bytes` is what each GPU writes of a checkpoint.

    The interval is Young's, sqrt(2 · checkpoint · mean time between failures), refined by Daly's first-order term (Daly, FGCS 22(3),
    2006): minus the checkpoint. Lost to it: one checkpoint an interval, and half an interval a failure.
    """
    steps = max(1.0, (plan.tokens or 0) / plan.tokens_of_step)
    seconds = steps * step_seconds
    between = plan.gpu_failure_hours * 3600 / plan.gpus
    writes = state_bytes / (plan.checkpoint_GBps * 1e9)
    interval = max(writes, sqrt(2 * writes * between) - writes)
    useful = max(0.0, 1 - writes / (interval + writes) - (interval / 2) / between) if interval else 1.0
    hours = seconds * plan.gpus / 3600
    power = gpu.board_power
    energy = hours * power / 1000 * plan.power_utilization * plan.pue if power else None
    return Run(
        seconds,
        hours,
        hours * price.dollars if price.dollars is not None else None,
        energy,
        energy * plan.grid_intensity if energy is not None else None,
        seconds / between,
        writes,
        interval,
        useful,
    )
