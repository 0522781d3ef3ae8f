"""vLLM's KV-cache manager: layers in groups that share one pool of blocks (vllm/v1/core/kv_cache_utils.py)."""

from __future__ import annotations

from dataclasses import dataclass

from calc.errors import InputError
from calc.serving.cache import Cache, Kept
from calc.serving.plan import ServingPlan
from calc.units import ceil_div


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that the manager treats alike. `size` is bytes of one token of one layer, or of the whole state of a recurrence.

    `rule` is "full", "window", "chunk" or "recurrent"; `most` the window or the chunk.
    """

    rule: str
    most: int
    size: int
    layers: int

    def blocks(self, tokens: int, block: int, in_flight: int, plan: ServingPlan) -> int:
        """Blocks that one request of so many tokens takes of one group, with `in_flight` tokens not yet settled."""
        if self.rule == "recurrent":
            return 2 if plan.prefix_caching else 1
        if self.rule == "window":
            return ceil_div(min(self.most - 1 + in_flight, tokens), block) + 1
        if self.rule == "chunk":
            return ceil_div(min(self.most + in_flight, tokens), block)
        return ceil_div(tokens, block)


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool of one GPU: bytes of a block with all its layers, blocks of one request, tokens of a block of attention."""

    block_bytes: int
    request_blocks: int
    block_size: int


def kinds_of(cache: Cache, counts: tuple[int, ...]) -> tuple[Kind, ...]:
    """The layers of a stage by kind; two mixers of one layer are two layers to it. InputError for layers whose layout in vLLM
    is not known here."""
    found: dict[tuple[str, int, int], int] = {}
    for layer, count in zip(cache.kinds, counts, strict=True):
        mixers = (tuple(t for t in layer if t.fixed), tuple(t for t in layer if not t.fixed))
        for kept in filter(None, mixers if count else ()):
            rule, most = _rule(kept)
            size = sum(cache.tensor_bytes(tensor, 1) - _spare(cache, tensor) for tensor in kept)
            found[rule, most, size] = found.get((rule, most, size), 0) + count
    return tuple(Kind(rule, most, size, layers) for (rule, most, size), layers in found.items())


def _rule(kept: tuple[Kept, ...]) -> tuple[str, int]:
    first = kept[0]
    if any(tensor.every > 1 or tensor.of_prompt for tensor in kept):
        raise InputError.of(
            "engine", "vllm", "its layout of compressed and of cross attention is not known here; use logical"
        )
    if first.fixed:
        return "recurrent", 0
    if first.most:
        return ("chunk" if first.letter == "c" else "window"), first.most
    return "full", 0


def _spare(cache: Cache, kept: Kept) -> int:
    """The newest input of a convolution, which vLLM does not keep."""
    return cache.tensor_bytes(kept, 1) // kept.taps if kept.taps else 0


def pool_of(kinds: tuple[Kind, ...], plan: ServingPlan, in_flight: int) -> Pool:
    """How layers of these kinds share a pool. With one rule for all, a block spans every layer; else layers form groups of equal
    size, and the blocks of all groups have one size in bytes."""
    if len({(kind.rule, kind.most) for kind in kinds}) == 1:
        rule = kinds[0].rule
        block = 1 if rule == "recurrent" else plan.block_size
        block_bytes = sum(kind.layers * kind.size * block for kind in kinds)
        return Pool(block_bytes, kinds[0].blocks(plan.context, block, in_flight, plan), block)
    widest = max((kind.size for kind in kinds if kind.rule != "recurrent"), default=0)
    state = max((kind.size for kind in kinds if kind.rule == "recurrent"), default=0)
    block = max(plan.block_size, 16 * ceil_div(state, 16 * widest))
    least, most = min(kind.layers for kind in kinds), max(kind.layers for kind in kinds)
    group = most if 2 * most < 3 * least else least
    request = 0
    for kind in kinds:
        own = block if kind.rule == "recurrent" else _block(kind, block, widest)
        request += ceil_div(kind.layers, group) * kind.blocks(plan.context, own, in_flight, plan)
    return Pool(group * block * widest, request, block)


def _block(kind: Kind, block: int, widest: int) -> int:
    """Tokens of a block of that kind, so that it is as many bytes as the widest kind's."""
    if widest % kind.size:
        raise InputError.of(
            "engine", "vllm", "it cannot page layers whose bytes a token do not divide each other; use logical"
        )
    return block * widest // kind.size
