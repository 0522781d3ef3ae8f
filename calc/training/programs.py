"""The table of programs: whose step an `implementation` is. One row each; none knows of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from calc.training.deepspeed.program import around
from calc.training.megatron.program import MEGATRON
from calc.training.plan import TrainingPlan
from calc.training.program import Program
from calc.training.torchtitan.program import TORCHTITAN
from calc.training.transformers.program import TRANSFORMERS

PROGRAMS: Final[Mapping[str, Program]] = {
    "hf": TRANSFORMERS,
    "liger": TRANSFORMERS,
    "deepspeed": around(TRANSFORMERS),
    "litgpt": TRANSFORMERS,
    "torchtune": TRANSFORMERS,
    "torchtitan": TORCHTITAN,
    "fused": MEGATRON,
    "paper": MEGATRON,
}


def program_of(plan: TrainingPlan) -> Program:
    """The plan's row."""
    return PROGRAMS[plan.implementation]
