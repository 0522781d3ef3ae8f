"""Gradient checkpointing on a chain of equal layers: activations kept against layers computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from calc.errors import InputError
from calc.units import ceil_div

SOURCE: Final = (
    "Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174 (https://arxiv.org/abs/1604.06174)"
)


class CheckpointingPlan(BaseModel):
    """A chain of layers, each of which needs its input in the backward pass."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chain_layers: int = Field(36, ge=1, le=10_000, description="layers of the chain")
    checkpoint_every: int = Field(
        6, ge=1, le=10_000, description="layers between two inputs that are kept; 1 keeps all"
    )


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Layer inputs kept at the end of the forward pass, alive at most in the backward pass, and layers computed a second time."""

    every: int
    kept: int
    peak: int
    recomputed: int
    layers: int

    @property
    def extra(self) -> float:
        """Share of one forward pass that is computed again."""
        return self.recomputed / self.layers


def checkpoints(plan: CheckpointingPlan) -> Checkpoints:
    """What keeping every k-th input does. InputError where there are fewer layers than that."""
    if plan.checkpoint_every > plan.chain_layers:
        raise InputError.of(
            "checkpoint_every", plan.checkpoint_every, f"it must be at most chain_layers ({plan.chain_layers})"
        )
    return _checkpoints(plan.chain_layers, plan.checkpoint_every)


def _checkpoints(layers: int, every: int) -> Checkpoints:
    kept = ceil_div(layers, every)
    last = layers - (kept - 1) * every
    # a segment of m layers makes m - 1 inputs again, next to the kept ones up to its own; full segments come after the last one
    full = kept - 1 + every - 1 if kept > 1 else 0
    return Checkpoints(every, kept, max(kept + last - 1, full), layers - kept, layers)


def every_distance(layers: int) -> tuple[Checkpoints, ...]:
    """The same for all distances from 1 to the whole chain."""
    return tuple(_checkpoints(layers, every) for every in range(1, layers + 1))


def best_distance(layers: int) -> Checkpoints:
    """The distance whose peak is lowest; of several the one that computes least again. It is near the square root of the layers."""
    return min(every_distance(layers), key=lambda each: (each.peak, each.recomputed))
