"""ZeRO: which training states each data-parallel rank keeps, and what the ranks send one another for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from calc.training.states.recipes import OPTIMIZERS, RECIPES
from calc.units import ceil_div

SOURCE: Final = "ZeRO, arXiv 1910.02054, sections 3.1 and 7 (https://arxiv.org/abs/1910.02054)"
OFFLOAD_SOURCE: Final = "ZeRO-Offload, arXiv 2101.06840, section 4 (https://arxiv.org/abs/2101.06840)"
_MOMENTS: Final = len(OPTIMIZERS["adamw"].moments)


class ZeroStagesPlan(BaseModel):
    """A model trained with AdamW on data-parallel ranks that share its states evenly."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trained_parameters: int = Field(7_500_000_000, ge=1, le=10**15, description="parameters that are trained")
    data_parallel_ranks: int = Field(64, ge=1, le=2**20, description="ranks that share the states")
    ledger: Literal["mixed-16", "megatron-bf16", "amp", "fp32", "pure-bf16"] = Field(
        "mixed-16", description="which copies of a parameter are kept, each in how many bytes"
    )


@dataclass(frozen=True, slots=True)
class RankStates:
    """Bytes on one rank's device, on its host, and sent by the rank in one step."""

    name: str
    weights: int
    gradients: int
    optimizer: int
    host: int
    sent: int

    @property
    def device(self) -> int:
        """All bytes on the device."""
        return self.weights + self.gradients + self.optimizer


def bytes_a_parameter(recipe: str) -> dict[str, int]:
    """What a recipe keeps of one parameter with AdamW: bytes by state, weight first."""
    ledger = RECIPES[recipe]
    kept = {state.name: state.bytes for state in ledger.states}
    return kept | {f"moment_{place + 1}": ledger.moment for place in range(_MOMENTS)}


def zero_stages(plan: ZeroStagesPlan) -> tuple[RankStates, ...]:
    """Stages 0 to 3, and ZeRO-Offload for 16-bit weights with fp32 masters. Shares of a rank are rounded up to whole bytes."""
    return tuple(_stages(plan))


def _stages(plan: ZeroStagesPlan) -> Iterator[RankStates]:
    count, ranks, ledger = plan.trained_parameters, plan.data_parallel_ranks, RECIPES[plan.ledger]
    states = [(state.group, state.bytes, state.zero) for state in ledger.states]
    states.append(("optimizer", _MOMENTS * ledger.moment, 1))
    gradient = sum(size for group, size, _ in states if group == "gradients")
    for stage in range(4):
        kept = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
        for group, size, first in states:
            kept[group] += ceil_div(count * size, ranks) if first <= stage else count * size
        # 0: all-reduce of gradients; 1 and 2: reduce-scatter, then all-gather of weights; 3: weights gathered in both passes
        moved = 2 * gradient if stage == 0 else gradient + ledger.weight * (2 if stage == 3 else 1)
        sent = _sent(count * moved, ranks)
        yield RankStates(f"ZeRO-{stage}", kept["parameters"], kept["gradients"], kept["optimizer"], 0, sent)
    if plan.ledger == "mixed-16":  # gradients, masters and moments live on the host, shared as by ZeRO-2
        host = ceil_div(count * (gradient + 4 + _MOMENTS * ledger.moment), ranks)
        yield RankStates("ZeRO-2 with offload", count * ledger.weight, 0, 0, host, _sent(count * 2 * gradient, ranks))


def _sent(moved: int, ranks: int) -> int:
    """Bytes that a rank of a ring sends of what the collectives move."""
    return ceil_div(moved * (ranks - 1), ranks)
