"""The pipeline stages: which layers each holds, and what one GPU of it carries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from calc.breakdown import Component
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.cache import Cache
from calc.serving.plan import ServingPlan
from calc.serving.weights import StoredWeights


@dataclass(frozen=True, slots=True)
class Load:
    """What one GPU of a stage carries: layers of each kind, bytes of weights and of one sequence's cache at the plan's context."""

    stage: int
    layers: range
    counts: tuple[int, ...]
    weights: int
    sequence: int
    activations: tuple[Component, ...]
    reserved: tuple[Component, ...] = ()
    draft_layers: int = 0  # of a draft, whose cache shares the pool

    @property
    def reserved_bytes(self) -> int:
        """What the engine takes besides weights, cache and activations."""
        return int(sum(part.total for part in self.reserved))

    @property
    def activation_bytes(self) -> int:
        return int(sum(part.total for part in self.activations))

    def total(self, sequences: int) -> int:
        """Bytes with so many sequences in the cache."""
        return self.weights + sequences * self.sequence + self.activation_bytes + self.reserved_bytes


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """The layers of each stage, as even as can be. What does not divide goes to the stages before the last, from the back
    (vLLM, distributed/utils.py, get_pp_indices): the last has the head, the first the embedding."""
    each, rest = divmod(layers, stages)
    sizes = [each] * stages
    for at in range(rest):
        sizes[stages - 2 - at] += 1
    found, start = [], 0
    for size in sizes:
        found.append(range(start, start + size))
        start += size
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an engine puts layers: those of each GPU, and the weights that a GPU with such layers holds."""

    layers: tuple[range, ...]
    weights: Callable[[range], tuple[Component, ...]]


class Parts(Protocol):
    """What an engine takes on one stage besides weights and cache."""

    def __call__(
        self, spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, layers: range
    ) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
        """(activations, reserved) of the stage with these layers."""
        ...


def loads(
    spec: ModelSpec,
    plan: ServingPlan,
    gpu: Gpu | None,
    stored: StoredWeights,
    cache: Cache,
    parts: Parts,
    placement: Placement | None = None,
    drafted: int = 0,
) -> tuple[Load, ...]:
    """The load of every stage: the layers in even shares, or as an engine places them. The last has `drafted` layers of a draft."""
    stages = _stages(spec, stored, plan.pp)
    if placement:
        stages = tuple(
            (layers, kind_counts(spec, layers), int(sum(part.total for part in placement.weights(layers))))
            for layers in placement.layers
        )
    found = []
    for stage, (layers, counts, weights) in enumerate(stages):
        activations, reserved = parts(spec, plan, gpu, layers)
        sequence = cache.sequence_bytes(counts, plan.context)
        of_draft = drafted if stage == len(stages) - 1 else 0
        found.append(Load(stage, layers, counts, weights, sequence, activations, reserved, of_draft))
    return tuple(found)


@lru_cache(maxsize=128)
def _stages(spec: ModelSpec, stored: StoredWeights, pp: int) -> tuple[tuple[range, tuple[int, ...], int], ...]:
    """(layers, layers of each kind, bytes of weights) of each stage; specs and weights hash by identity."""
    return tuple(
        (layers, kind_counts(spec, layers), stored.stage_bytes(layers, pp))
        for layers in stage_layers(spec.num_hidden_layers, pp)
    )


def kind_counts(spec: ModelSpec, layers: range) -> tuple[int, ...]:
    """How many of these layers are of each kind."""
    if len(layers) == spec.num_hidden_layers:
        return spec.layers.counts
    pattern = spec.layers.pattern[layers.start : layers.stop]
    return tuple(pattern.count(kind) for kind in range(len(spec.layers.kinds)))
