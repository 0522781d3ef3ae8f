"""What 16 bits lose in training: gradients that become 0 without a scale, and small steps that a sum swallows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from calc.number_formats import quantize

SOURCE: Final = "Mixed Precision Training, arXiv 1710.03740, sections 3.1 and 3.2 (https://arxiv.org/abs/1710.03740)"
LARGEST_SCALE: Final = 30  # as a power of two
FORMATS: Final = ("fp32", "bf16", "fp16")
_SPREAD: Final = 3.0  # standard deviation of the logarithm of the drawn gradients
_DRAWN: Final = 20_000


class HalfPrecisionPlan(BaseModel):
    """Gradients drawn around a typical size, and a weight that takes many small steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    typical_gradient: float = Field(1e-7, gt=0, le=1, description="median of the gradients' magnitudes")
    loss_scale_power: int = Field(
        0, ge=0, le=LARGEST_SCALE, description="the loss is multiplied by 2 to this power, the gradients with it"
    )
    weight: float = Field(1.0, gt=0, le=1000, description="a weight before the steps")
    weight_step: float = Field(0.0002, gt=0, le=1, description="what each step adds to it")
    weight_steps: int = Field(500, ge=1, le=2000, description="steps")


@dataclass(frozen=True, slots=True)
class Scaled:
    """Shares of the gradients that a format turns into 0 and into infinity under a loss scale of 2 to `power`."""

    power: int
    zero: float
    infinite: float


@lru_cache(maxsize=8)
def scaled(typical: float) -> tuple[Scaled, ...]:
    """In fp16, for each loss scale; the gradients are log-normal and the same each time."""
    drawn = typical * np.exp(_SPREAD * np.random.default_rng(0).standard_normal(_DRAWN))
    found = []
    for power in range(LARGEST_SCALE + 1):
        with np.errstate(over="ignore"):
            kept = (drawn * 2.0**power).astype(np.float16)
        found.append(Scaled(power, float(np.mean(kept == 0)), float(np.mean(np.isinf(kept)))))
    return tuple(found)


def summed(plan: HalfPrecisionPlan) -> Mapping[str, float]:
    """The weight after its steps in each format, rounded after each; `exact` is the sum without rounding."""
    found = {name: _summed(name, plan) for name in FORMATS}
    return {"exact": plan.weight + plan.weight_steps * plan.weight_step, **found}


def _summed(name: str, plan: HalfPrecisionPlan) -> float:
    value = quantize(np.array([plan.weight]), name)
    for _ in range(plan.weight_steps):
        after = quantize(value.astype(np.float64) + plan.weight_step, name)
        if after == value:  # the step is less than half of the spacing: nothing changes any more
            break
        value = after
    return float(value[0])
