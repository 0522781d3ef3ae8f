"""The pipeline stages: which layers each holds, and what one GPU of it carries."""

from __future__ import annotations

from dataclasses import dataclass

from calc.breakdown import Component
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.activations import activations
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

    @property
    def activation_bytes(self) -> int:
        return int(sum(part.total for part in self.activations))

    def total(self, sequences: int) -> int:
        """Bytes with so many sequences in the cache."""
        return self.weights + sequences * self.sequence + self.activation_bytes


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


def loads(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, stored: StoredWeights, cache: Cache) -> tuple[Load, ...]:
    """The load of every stage."""
    found = []
    for stage, layers in enumerate(stage_layers(spec.num_hidden_layers, plan.pp)):
        counts = kind_counts(spec, layers)
        last = layers.stop == spec.num_hidden_layers
        found.append(
            Load(
                stage,
                layers,
                counts,
                stored.stage_bytes(layers, plan.pp),
                cache.sequence_bytes(counts, plan.context),
                activations(spec, plan, gpu, last),
            )
        )
    return tuple(found)


def kind_counts(spec: ModelSpec, layers: range) -> tuple[int, ...]:
    """How many of these layers are of each kind."""
    if len(layers) == spec.num_hidden_layers:
        return spec.layers.counts
    pattern = spec.layers.pattern[layers.start : layers.stop]
    return tuple(pattern.count(kind) for kind in range(len(spec.layers.kinds)))
