"""Which layers llama.cpp puts on the GPU, and what stays in host memory."""

from __future__ import annotations

from itertools import pairwise

from calc.breakdown import Component
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.cache import Cache
from calc.serving.capacity import limit_of
from calc.serving.llama_cpp.buffers import buffers
from calc.serving.llama_cpp.capacity import share_of
from calc.serving.plan import ServingPlan
from calc.serving.stages import Placement, stage_layers
from calc.serving.weights import StoredWeights


def place(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, stored: StoredWeights, cache: Cache) -> Placement:
    """The layers and weights of each GPU: of all layers the last `gpu_layers` - 1 (the output is one more), shared out in order."""
    return Placement(_placed(spec, plan, gpu, stored, cache), lambda layers: device_weights(stored, plan, layers))


def _placed(
    spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, stored: StoredWeights, cache: Cache
) -> tuple[range, ...]:
    layers = spec.num_hidden_layers
    chosen = plan.gpu_layers
    if chosen is None:
        chosen = layers + 1
    elif chosen == "auto":
        chosen = _most(spec, plan, gpu, stored, cache)
    first = max(0, layers + 1 - chosen)
    return stage_layers(layers, plan.pp) if first == 0 else _shares(range(min(first, layers), layers), plan.pp)


def _shares(layers: range, gpus: int) -> tuple[range, ...]:
    """These layers over so many GPUs, as even as can be."""
    cuts = [layers.start + len(layers) * at // gpus for at in range(gpus + 1)]
    return tuple(range(low, high) for low, high in pairwise(cuts))


def _most(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, stored: StoredWeights, cache: Cache) -> int:
    """The most layers that fit one GPU with all sequences at the plan's context; the output goes first."""
    layers = spec.num_hidden_layers
    limit = limit_of(plan, gpu, share_of(gpu))
    if limit is None or plan.kv_memory_gib is not None or plan.pp > 1:
        return layers + 1
    left = limit - int(sum(part.total for part in buffers(spec, plan, gpu, range(layers))[0]))
    left -= int(sum(part.total for part in device_weights(stored, plan, range(layers, layers))))
    if left < 0:
        return 0
    for at in reversed(range(layers)):
        one = range(at, at + 1)
        counts = tuple(int(spec.layers.pattern[at] == kind) for kind in range(len(spec.layers.kinds)))
        left -= stored.sizes[stored.pattern[at]] + plan.concurrency * cache.sequence_bytes(counts, plan.context)
        if left < 0:
            return layers - one.start
    return layers + 1


def device_weights(stored: StoredWeights, plan: ServingPlan, layers: range) -> tuple[Component, ...]:
    """The weights of a GPU with these layers. The input embedding stays on the host; a tied head is a copy of it on the last GPU."""
    parts = [part for part in stored.stage(layers, plan.pp) if part.name not in ("embedding", "tied_head")]
    if layers.stop == len(stored.pattern) and plan.gpu_layers != 0:
        parts += stored.head_copy
    return tuple(parts)
