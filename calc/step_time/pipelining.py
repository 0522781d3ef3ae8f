"""Where the layers lie in a pipeline, and how long its busiest rank waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from calc.model.spec import ModelSpec
from calc.pipeline import SCHEDULES, PipelinePlan, simulate
from calc.pipeline.orders import model_stage
from calc.step_time.plan import TimePlan
from calc.training.pipeline_stages import part_starts

if TYPE_CHECKING:
    from calc.step_time.step import RankSeconds


def layers_of_ranks(plan: TimePlan, spec: ModelSpec) -> tuple[tuple[Counter[int], bool, bool], ...]:
    """For each rank: how many layers of each kind, and whether it holds the embedding and the head."""
    starts = part_starts(plan, len(spec.layers.pattern))
    return _layers(spec.layers.pattern, starts, plan.pp, plan.virtual_stages, SCHEDULES[plan.schedule].shape)


@lru_cache(maxsize=1024)
def _layers(
    pattern: tuple[int, ...], starts: tuple[int, ...], p: int, v: int, shape: str
) -> tuple[tuple[Counter[int], bool, bool], ...]:
    made = []
    for rank in range(p):
        parts = [model_stage(shape, p, rank, chunk) for chunk in range(v)]
        counts = Counter(kind for part in parts for kind in pattern[starts[part] : starts[part + 1]])
        made.append((counts, 0 in parts, p * v - 1 in parts))
    return tuple(made)


def pipeline_bubble(plan: TimePlan, ranks: Sequence[RankSeconds]) -> float:
    """Seconds beyond the busiest rank's own work. For 1F1B, GPipe and PipeDream the sum of the other ranks' micro-batches, over v
    where chunks interleave (Megatron-LM, arXiv 2104.04473, section 2.2); the other schedules are simulated."""
    if plan.pp == 1:
        return 0.0
    whole = [rank.whole for rank in ranks]
    others = sum(whole) - max(whole)
    if plan.schedule == "naive":
        return plan.microbatches * others
    if plan.schedule in ("gpipe", "1f1b", "pipedream"):
        return others
    if plan.schedule in ("interleaved", "looped-bfs"):
        return others / plan.virtual_stages
    forward = tuple(rank.forward for rank in ranks)
    weight = tuple(rank.weight_gradient for rank in ranks)
    inputs = tuple(max(0.0, all_ - a - b) for all_, a, b in zip(whole, forward, weight, strict=True))
    return _simulated(
        plan.schedule, plan.pp, min(plan.microbatches, 3 * plan.pp), plan.virtual_stages, forward, inputs, weight
    )


@lru_cache(maxsize=64)
def _simulated(
    schedule: str,
    stages: int,
    microbatches: int,
    virtual_stages: int,
    forward: tuple[float, ...],
    inputs: tuple[float, ...],
    weight: tuple[float, ...],
) -> float:
    """The bubble of a schedule, which no longer grows once the pipeline is full."""
    made = PipelinePlan(
        schedule=schedule,
        stages=stages,
        microbatches=microbatches,
        virtual_stages=virtual_stages,
        forward=forward,
        backward_input=inputs,
        backward_weight=weight,
    )
    return simulate(made).makespan_bubble
