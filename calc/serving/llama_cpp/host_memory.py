"""What an engine that places layers itself keeps in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from calc.breakdown import Component
from calc.model.spec import ModelSpec
from calc.serving.cache import Cache
from calc.serving.llama_cpp.placement import host_experts
from calc.serving.plan import ServingPlan
from calc.serving.stages import Placement, kind_counts
from calc.serving.weights import StoredWeights


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What an engine keeps in host memory: bytes of weights and of all sequences' cache. `gpu_layers` are those on GPUs, the output
    among them; None where the engine has no choice."""

    weights: int = 0
    state: int = 0
    gpu_layers: int | None = None


def host_memory(
    spec: ModelSpec, plan: ServingPlan, stored: StoredWeights, cache: Cache, placement: Placement | None
) -> HostMemory:
    """What stays in host memory where the engine places layers itself."""
    if placement is None:
        return HostMemory()
    weights = sum(part.total for part in host_weights(spec, plan, stored, placement.layers))
    weights += sum(host_experts(stored, plan, layers) for layers in placement.layers)
    counts = host_counts(spec, placement.layers)
    on_gpu = spec.num_hidden_layers - sum(counts)
    state = plan.streams * cache.sequence_bytes(counts, plan.context)
    return HostMemory(int(weights), state, on_gpu + (plan.gpu_layers != 0))


def host_weights(
    spec: ModelSpec, plan: ServingPlan, stored: StoredWeights, placed: tuple[range, ...]
) -> tuple[Component, ...]:
    """What no GPU holds: the input embedding, the layers before the first placed one, and without any layer on a GPU the output."""
    first = min((layers.start for layers in placed if layers), default=spec.num_hidden_layers)
    parts = stored.stage(range(first), 1) if first else stored.first[:1]
    outputs = {part.name for part in stored.last} if plan.gpu_layers != 0 else set()
    return tuple(part for part in parts if part.name not in outputs)


def host_counts(spec: ModelSpec, placed: tuple[range, ...]) -> tuple[int, ...]:
    """How many layers of each kind keep their cache on the host."""
    first = min((layers.start for layers in placed if layers), default=spec.num_hidden_layers)
    return kind_counts(spec, range(first))
