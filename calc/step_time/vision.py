"""The vision tower in a step: its layers over the patches of each sequence's pictures, and what joins them to the text."""

from __future__ import annotations

from functools import lru_cache

from calc.errors import InputError
from calc.model.spec import ModelSpec, Tower
from calc.model.weights import Weight
from calc.step_time.layer_times import LayerSeconds, LayerTimer, Seconds
from calc.step_time.operations import Gemm, LayerOperations, Sharding, layer_operations
from calc.step_time.plan import TimePlan


def tower_of(spec: ModelSpec) -> Tower:
    """The tower that reads pictures. InputError for a model without one, or whose tower is no stack of layers over patches."""
    for tower in spec.towers:
        if tower.in_total and len(tower.stack) and _patch(tower) is not None:
            return tower
    raise InputError.of("picture_patches", "given", f"{spec.name} has no vision tower of layers over patches")


def _weights(tower: Tower) -> dict[str, Weight]:
    return {weight.name: weight for part in tower.parts for weight in part.weights}


def _patch(tower: Tower) -> Weight | None:
    """The product that makes features of a patch's pixels."""
    found = _weights(tower).get("patch")
    return found if found and found.matmul and len(found.shape) == 2 else None


def _merged(tower: Tower) -> int:
    """Patches that become one token: as many times as the projector's input is as wide as a patch."""
    patch, joined = _patch(tower), _weights(tower).get("up")
    assert patch
    return max(1, joined.shape[1].size // patch.shape[0].size) if joined and len(joined.shape) == 2 else 1


def tower_parameters(tower: Tower) -> int:
    """Parameters of layers and projections."""
    parts = [part for parts in tower.stack.kind_parts for part in parts]
    counts = [count for parts, count in zip(tower.stack.kind_parts, tower.stack.counts, strict=True) for _ in parts]
    layers = sum(
        part.copies * count * sum(w.parameters for w in part.weights) for part, count in zip(parts, counts, strict=True)
    )
    return layers + sum(weight.parameters for weight in _weights(tower).values())


@lru_cache(maxsize=64)
def _operations(tower: Tower, patches: int, pictures: int) -> tuple[tuple[LayerOperations, ...], tuple[Gemm, ...]]:
    """The operations of each kind of layer, and the products before and behind them, for so many pictures.

    A class token is one more row of each layer.
    """
    rows = patches + ("class" in _weights(tower))
    sharding = Sharding(pictures * rows)
    layers = tuple(layer_operations(kind, rows, sharding) for kind in tower.stack.kinds)
    ends = []
    for part in tower.parts:
        for weight in part.weights:
            if weight.matmul and len(weight.shape) == 2:
                tokens = pictures * patches // (1 if weight.name == "patch" else _merged(tower))
                ends.append(Gemm(weight.name, tokens, weight.shape[0].size, weight.shape[1].size, part="vision"))
    return layers, tuple(ends)


def picture_flops(spec: ModelSpec, plan: TimePlan) -> int:
    """Forward FLOPs of one sequence's pictures; every patch of a picture meets every other."""
    tower = tower_of(spec)
    layers, ends = _operations(tower, plan.picture_patches, plan.pictures)
    found = sum(gemm.flops for gemm in ends)
    for one, count in zip(layers, tower.stack.counts, strict=True):
        pairs = sum(plan.pictures * core.seq**2 * core.heads * (core.head_dim + core.v_head_dim) for core in one.cores)
        found += count * (sum(gemm.flops for gemm in one.gemms) + 2 * pairs)
    return found


def tower_seconds(spec: ModelSpec, timer: LayerTimer) -> LayerSeconds:
    """One micro-batch's pictures on the rank that embeds; tensor and context parallelism do not divide them."""
    plan, tower = timer.plan, tower_of(spec)
    layers, ends = _operations(tower, plan.picture_patches, plan.pictures * plan.sequences)
    mine = LayerTimer(timer.gpu, plan, timer.kernels, Sharding(layers[0].gemms[0].m))
    nothing = Seconds()
    forward, inputs, weights, again = nothing, nothing, nothing, nothing
    passes = [(mine.head(ends, None), 1)]
    passes += [(mine.layer(one), count) for one, count in zip(layers, tower.stack.counts, strict=True)]
    for one, count in passes:
        forward += one.forward.times(count)
        inputs += one.input_gradient.times(count)
        weights += one.weight_gradient.times(count)
        again += one.again.times(count)
    return LayerSeconds(forward, inputs, weights, again)
