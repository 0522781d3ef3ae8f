"""The operations of a layer's feed-forward: dense, or experts with their router and exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from calc.model.feed_forward import MLP, MoE
from calc.model.spec import Layer
from calc.model.weights import Part
from calc.serving.speed.rank import Rank
from calc.serving.speed.work import BYTES, Array, TokenWork, Work
from calc.units import ceil_div


def feed_forward_operations(
    rank: Rank, kind: Layer, feed_forward: MLP | MoE, parts: tuple[Part, ...]
) -> Iterator[Work]:
    if isinstance(feed_forward, MLP):
        part = next(part for part in parts if part.name == "mlp")
        yield from _mlp(rank, kind, part, feed_forward)
        if rank.layout.tp > 1:
            yield TokenWork("all_reduce/feed_forward", 1, rank.all_reduce)
        return
    yield from _experts(rank, kind, feed_forward, parts)


def _mlp(rank: Rank, kind: Layer, part: Part, mlp: MLP) -> Iterator[TokenWork]:
    yield from rank.matmuls(kind, part)
    width = ceil_div(mlp.intermediate_size, rank.layout.tp) * BYTES
    read = width * (2 if mlp.gated else 1)
    yield TokenWork(f"{part.name}/activation", 1, lambda tokens: rank.times.memory_bound(tokens * read, tokens * width))


def _experts(rank: Rank, kind: Layer, moe: MoE, parts: tuple[Part, ...]) -> Iterator[Work]:
    layout, times, h = rank.layout, rank.times, rank.spec.hidden_size
    by_name = {part.name: part for part in parts}
    yield from rank.matmuls(kind, by_name["router"])
    yield TokenWork("router/choice", 1, rank.passed(moe.num_experts * 4, moe.num_experts_per_tok * 8))
    experts = by_name["experts"]
    weight = next(weight for weight in experts.weights if weight.matmul)
    form = rank.format(kind, experts, weight)
    if layout.dp > 1:
        yield TokenWork("all_to_all/dispatch", 1, _dispatch(rank, form), of_replica=True)

    kernels = rank.fp8_block_experts if form == "fp8_block" and rank.fp8_block_experts else times

    def seconds(tokens: Array) -> Array:
        return kernels.experts(
            tokens=tokens,
            hidden=h,
            intermediate=moe.expert.intermediate_size,
            num_experts=moe.num_experts,
            top_k=moe.num_experts_per_tok,
            ep=layout.ep,
            tp=layout.expert_tp,
            dtype=form,
            skew="power_law",
        )

    yield TokenWork("experts", 1, seconds, of_replica=True)
    if moe.shared and "shared_expert" in by_name:
        yield from _mlp(rank, kind, by_name["shared_expert"], moe.shared)
        yield TokenWork("shared_expert/sum", 2 if moe.shared_gate else 1, rank.passed(2 * h * BYTES, h * BYTES))
    if layout.dp > 1:
        yield TokenWork("all_to_all/combine", 1, _combine(rank), of_replica=True)
    elif layout.tp > 1:
        yield TokenWork("all_reduce/feed_forward", 1, rank.all_reduce)


def _dispatch(rank: Rank, form: str) -> Callable[[Array], Array]:
    """Attention ranks gather each other's tokens before the experts, in the format that the experts read."""
    size = rank.spec.hidden_size * {"fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}.get(form, 2.0)
    return lambda tokens: rank.times.collective("all_gather", tokens * size, rank.layout.ranks)


def _combine(rank: Rank) -> Callable[[Array], Array]:
    size = rank.spec.hidden_size * BYTES
    return lambda tokens: rank.times.collective("reduce_scatter", tokens * size, rank.layout.ranks)
