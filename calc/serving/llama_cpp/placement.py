"""Which layers llama.cpp puts on the GPU, and what stays in host memory."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, pairwise
from math import ceil

from calc.breakdown import Component, unique_names
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.cache import Cache
from calc.serving.capacity import limit_of
from calc.serving.llama_cpp.buffers import buffers
from calc.serving.llama_cpp.capacity import share_of
from calc.serving.plan import ServingPlan
from calc.serving.stages import Placement
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
    return _shares(range(min(max(0, layers + 1 - chosen), layers), layers), plan.splits)


def _shares(layers: range, splits: tuple[Fraction, ...]) -> tuple[range, ...]:
    """These layers over the GPUs: a layer goes to the first whose share reaches beyond it, where the output counts as the layer after
    the last (src/llama-model.cpp, load_tensors)."""
    reach = list(accumulate(share / sum(splits) for share in splits))
    cuts = [layers.start + min(len(layers), ceil(end * (len(layers) + 1))) for end in reach[:-1]]
    return tuple(range(low, high) for low, high in pairwise([layers.start, *cuts, layers.stop]))


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
        left -= stored.sizes[stored.pattern[at]] - host_experts(stored, plan, one)
        left -= plan.streams * cache.sequence_bytes(counts, plan.context)
        if left < 0:
            return layers - one.start
    return layers + 1


def device_weights(stored: StoredWeights, plan: ServingPlan, layers: range) -> tuple[Component, ...]:
    """The weights of a GPU with these layers. The input embedding stays on the host, and the experts of the first `n_cpu_moe` layers; a
    tied head is a copy of it on the last GPU."""
    cut = min(max(plan.n_cpu_moe or 0, layers.start), layers.stop)
    held, without = range(cut, layers.stop), range(layers.start, cut)
    parts = [_without_experts(part) for part in stored.stage(without, plan.pp)] if without else []
    if held or not without:
        parts += stored.stage(held, plan.pp)
    parts = [part for part in parts if part.name not in ("embedding", "tied_head")]
    if layers.stop == len(stored.pattern) and plan.gpu_layers != 0:
        parts += stored.head_copy
    return unique_names(parts)


def host_experts(stored: StoredWeights, plan: ServingPlan, layers: range) -> int:
    """Bytes of the experts of these layers that stay on the host."""
    kept = range(layers.start, min(plan.n_cpu_moe or 0, layers.stop))
    return sum(stored.experts[stored.pattern[layer]].bytes for layer in kept)


def _without_experts(part: Component) -> Component:
    if not part.children:
        return part
    children = tuple(_without_experts(child) for child in part.children if child.name != "experts")
    return Component(part.name, children=children, count=part.count)
