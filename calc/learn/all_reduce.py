"""The ring all-reduce, one step after another, and what it moves next to a tree and a parameter server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from calc.errors import InputError
from calc.units import ceil_div

SOURCE: Final = "Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms, section 3 (https://doi.org/10.1016/j.jpdc.2008.09.002)"


class AllReducePlan(BaseModel):
    """Ranks that add up a buffer of equal size, and how many steps of the ring are over."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ring_ranks: int = Field(4, ge=2, le=16, description="ranks in the ring, each with one chunk for each rank")
    ring_step: int = Field(2, ge=0, le=30, description="steps that are over; the ring takes 2 (n - 1)")
    message_bytes: int = Field(2**30, ge=1, le=2**50, description="bytes of the buffer that is added up")


@dataclass(frozen=True, slots=True)
class Ring:
    """`summed[rank][chunk]` is how many ranks' numbers that chunk holds on that rank; `sent` is bytes by one rank so far."""

    summed: tuple[tuple[int, ...], ...]
    steps: int
    sent: int


@dataclass(frozen=True, slots=True)
class Volume:
    """What one way of adding up costs: bytes through its busiest rank, one way, and steps one after another."""

    name: str
    busiest: int
    steps: int


def ring(plan: AllReducePlan) -> Ring:
    """The ring after so many steps: first chunks are added up on their way round, then the sums go round. InputError past its end."""
    ranks = plan.ring_ranks
    steps = 2 * (ranks - 1)
    if plan.ring_step > steps:
        raise InputError.of("ring_step", plan.ring_step, f"{ranks} ranks take {steps} steps")
    summed = [[1] * ranks for _ in range(ranks)]
    for step in range(plan.ring_step):
        moved = [((rank - step) % ranks, (rank + 1) % ranks) for rank in range(ranks)]
        if step >= ranks - 1:
            moved = [((rank + 1 - (step - ranks + 1)) % ranks, (rank + 1) % ranks) for rank in range(ranks)]
        before = [list(row) for row in summed]
        for rank, (chunk, to) in enumerate(moved):
            gained = before[rank][chunk]
            summed[to][chunk] = before[to][chunk] + gained if step < ranks - 1 else gained
    chunk_bytes = ceil_div(plan.message_bytes, ranks)
    return Ring(tuple(map(tuple, summed)), steps, plan.ring_step * chunk_bytes)


def volumes(plan: AllReducePlan) -> tuple[Volume, ...]:
    """Bytes that the busiest rank sends, and steps, of a ring, of a binary tree and of a parameter server on one of the ranks."""
    ranks, size = plan.ring_ranks, plan.message_bytes
    # a binary tree in the order of a heap: a rank sends its sum up, unless it is the root, and the result down to its children
    tree = max((rank > 0) + sum(child < ranks for child in (2 * rank + 1, 2 * rank + 2)) for rank in range(ranks))
    return (
        Volume("ring", ceil_div(2 * (ranks - 1) * size, ranks), 2 * (ranks - 1)),
        Volume("binary tree", tree * size, 2 * (ranks.bit_length() - 1)),
        Volume("parameter server", (ranks - 1) * size, 2),
    )
