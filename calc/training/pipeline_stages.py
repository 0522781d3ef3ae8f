"""Which blocks a pipeline stage holds, how often, and with how many micro-batches in flight."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from calc.errors import InputError
from calc.model.spec import ModelSpec
from calc.pipeline import in_flight
from calc.pipeline.orders import model_stage
from calc.pipeline.schedules import SCHEDULES
from calc.training.plan import TrainingPlan


class Stage(NamedTuple):
    """One rank of the pipeline: its layers in order of depth (their kinds), the ends it holds, the chunks in flight.

    `chunks` counts (micro-batch, chunk) pairs of which `virtual` make the whole rank.
    """

    rank: int
    layers: tuple[int, ...]
    first: bool
    last: bool
    begins: bool  # the model's very first layer is here
    chunks: int
    virtual: int

    @property
    def counts(self) -> Counter[int]:
        return Counter(self.layers)


def _shape(schedule: str) -> str:
    return "v" if SCHEDULES[schedule].chunks == "two" else "loop"


def must_be_modelled(spec: ModelSpec) -> None:
    """InputError for layers whose training is not modelled."""
    if any(kind.reused or kind.second or getattr(kind.mixer, "routed", False) for kind in spec.layers.kinds):
        raise InputError(
            f"model: layers of {spec.name} share weights, hold two mixers or route attention: their training is not modelled; "
            "python -m measure trace runs the real step",
            "model",
        )


def stages(plan: TrainingPlan, spec: ModelSpec) -> tuple[Stage, ...]:
    """Every rank of the pipeline. Layers are dealt out evenly, the first parts one longer where they do not divide.

    InputError for layers whose training is not modelled.
    """
    must_be_modelled(spec)
    pattern = spec.layers.pattern
    p, v = plan.pp, plan.virtual_stages
    if p == 1:
        return (Stage(0, pattern, True, True, True, 1, 1),)
    size, longer = divmod(len(pattern), p * v)
    starts = [part * size + min(part, longer) for part in range(p * v + 1)]
    held = in_flight(plan.schedule, p, plan.microbatches, v)
    made = []
    for rank in range(p):
        parts = [model_stage(_shape(plan.schedule), p, rank, chunk) for chunk in range(v)]
        layers = tuple(kind for part in sorted(parts) for kind in pattern[starts[part] : starts[part + 1]])
        made.append(Stage(rank, layers, 0 in parts, p * v - 1 in parts, 0 in parts, held[rank], v))
    return tuple(made)
