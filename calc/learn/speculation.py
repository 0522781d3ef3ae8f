"""Speculative decoding: what a draft of several tokens gains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from calc.serving.speed.options import SpeedOptions

SOURCE: Final = "Leviathan et al., arXiv 2211.17192, equation 1 and theorem 3.8 (https://arxiv.org/abs/2211.17192)"
LONGEST: Final = 16  # tokens of a draft


class SpeculationPlan(BaseModel):
    """A small model drafts, the large one checks all drafted tokens in one step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drafted: int = Field(4, ge=0, le=LONGEST, description="tokens of a draft")
    acceptance: float = Field(0.8, ge=0, le=0.99, description="chance that a drafted token is accepted")
    draft_cost: float = Field(0.05, ge=0, le=1, description="time of a draft's step, a share of the large model's step")


@dataclass(frozen=True, slots=True)
class Gain:
    """Tokens of one round, in expectation, and how many times faster they come than one by one."""

    drafted: int
    tokens: float
    speedup: float


def gains(plan: SpeculationPlan) -> tuple[Gain, ...]:
    """The gain of each length of a draft, none first."""
    return tuple(_gain(plan, drafted) for drafted in range(LONGEST + 1))


def _gain(plan: SpeculationPlan, drafted: int) -> Gain:
    tokens = SpeedOptions(draft_tokens=drafted, draft_acceptance=plan.acceptance).tokens_a_step
    return Gain(drafted, tokens, tokens / (drafted * plan.draft_cost + 1))
