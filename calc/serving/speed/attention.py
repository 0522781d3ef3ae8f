"""The operations of a layer's mixers: attention and its kin, and recurrences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from calc.model.mixers import Attention, CompressedAttention, Indexer, LatentAttention, Mixer, Recurrence
from calc.model.spec import Layer
from calc.model.weights import Part, Split
from calc.serving.speed.rank import Rank, gemm
from calc.serving.speed.recurrences import recurrence
from calc.serving.speed.work import BYTES, Array, SequenceWork, TokenWork, Work
from calc.units import ceil_div


def mixer_operations(rank: Rank, kind: Layer, mixer: Mixer, parts: list[Part]) -> Iterator[Work]:
    if isinstance(mixer, LatentAttention):
        yield from _latent(rank, kind, mixer, parts)
        return
    for part in parts:
        yield from rank.matmuls(kind, part)
    if isinstance(mixer, Recurrence):
        yield recurrence(rank.times, mixer, rank.layout.tp, rank.query)
        output = next((weight.shape[-1].size for weight in mixer.weights if weight.split is Split.INPUT), 0)
        width = output // rank.layout.tp * BYTES
        yield TokenWork(f"{mixer.kind}/gated_norm", 1, rank.passed(2 * width, width))
    elif isinstance(mixer, Attention):
        yield from _rotary(rank, mixer)
        yield _attention(rank, mixer)
        if mixer.gated:
            width = ceil_div(mixer.num_attention_heads, rank.layout.tp) * mixer.head_dim * BYTES
            yield TokenWork("attention/gate", 1, rank.passed(2 * width, width))
        if mixer.indexer:
            yield from _index(rank, mixer.indexer)
    elif isinstance(mixer, CompressedAttention):
        yield _compressed(rank, mixer)
        if mixer.indexer:
            yield from _index(rank, mixer.indexer)


def _rotary(rank: Rank, mixer: Attention) -> Iterator[TokenWork]:
    """Query and key norms, rotation, and the write to the cache: passes over queries, keys and values. A norm over all heads at
    once (MiniMax-M2) needs the sums of all ranks."""
    heads = ceil_div(mixer.num_attention_heads, rank.layout.tp)
    kv = max(1, mixer.num_key_value_heads // rank.layout.tp)
    size = (heads + 2 * kv) * mixer.head_dim * BYTES
    yield TokenWork("attention/rotary", 1, rank.passed(size, size))
    if mixer.q_norm:
        yield TokenWork("attention/norms", 1, rank.passed(size, size))
        if rank.layout.tp > 1 and mixer.q_norm.size.size > mixer.head_dim:
            yield TokenWork("all_reduce/norms", 1, lambda tokens: rank.reduced(tokens * 8))


def _attention(rank: Rank, mixer: Attention) -> SequenceWork:
    heads = ceil_div(mixer.num_attention_heads, rank.layout.tp)
    kv = max(1, mixer.num_key_value_heads // rank.layout.tp)
    window = mixer.window or mixer.chunk
    top = mixer.indexer.topk if mixer.indexer else 0
    times = rank.times

    def decode(batch: Array, context: Array) -> Array:
        met = np.minimum(context, top) if top else context
        return times.decode_attention(
            batch=batch,
            context=met,
            heads=heads,
            kv_heads=kv,
            head_dim=mixer.head_dim,
            kv_dtype=rank.cache,
            window=window,
        )

    def prefill(batch: Array, new: Array, context: Array) -> Array:
        return times.context_attention(
            batch=batch,
            query=new,
            context=context,
            heads=heads,
            kv_heads=kv,
            head_dim=mixer.head_dim,
            kv_dtype=rank.cache,
            window=window,
        )

    return SequenceWork("attention/core", 1, decode, prefill)


def _latent(rank: Rank, kind: Layer, mixer: LatentAttention, parts: list[Part]) -> Iterator[Work]:
    """MLA: absorbed in decode (the latents are keys and values of one head), expanded in prefill."""
    heads = ceil_div(mixer.num_attention_heads, rank.layout.tp)
    latent, nope, v = mixer.kv_lora_rank, mixer.qk_nope_head_dim, mixer.v_head_dim
    skip = frozenset(("key_value_up",))
    for part in parts:
        yield from rank.matmuls(kind, part, skip)
    up = next(weight for weight in parts[0].weights if weight.name == "key_value_up")
    form = rank.format(kind, parts[0], up)
    times, kv, query = rank.times, rank.cache, rank.query
    top = mixer.indexer.topk if mixer.indexer else 0
    width = heads * (mixer.head_dim + v) * BYTES
    yield TokenWork("attention/rotary", 1, lambda tokens: times.memory_bound(tokens * width, tokens * width))
    absorb_k, absorb_v = gemm(times, heads * latent, nope, "bf16"), gemm(times, heads * v, latent, "bf16")
    expand = gemm(times, heads * (nope + v), latent, form)

    def decode(batch: Array, context: Array) -> Array:
        met = np.minimum(context, top) if top else context
        core = times.mla_decode(
            batch=batch * query,
            context=met,
            heads=heads,
            kv_lora_rank=latent,
            qk_rope=mixer.qk_rope_head_dim,
            kv_dtype=kv,
        )
        return core + absorb_k(batch * query) + absorb_v(batch * query)

    def prefill(batch: Array, new: Array, context: Array) -> Array:
        core = times.mla_context(
            batch=batch,
            query=new,
            context=context,
            heads=heads,
            qk_nope=nope,
            qk_rope=mixer.qk_rope_head_dim,
            v_head=v,
            kv_dtype=kv,
        )
        return core + expand(batch * (new + context))

    yield SequenceWork("attention/core", 1, decode, prefill)
    if mixer.indexer:
        yield from _index(rank, mixer.indexer)


def _index(rank: Rank, indexer: Indexer) -> Iterator[Work]:
    """The indexer scores every key: 1 byte a feature and one fp32 scale, read in each step; matmuls in fp8. Before that its key is
    normalised, and queries and key are rotated, mixed by a Hadamard transform and quantised (DeepSeek-V3.2-Exp, model.py)."""
    width = (indexer.heads + 1) * indexer.head_dim * BYTES
    yield TokenWork("indexer/prepare", 4, rank.passed(width, width))
    size, heads, times, query = indexer.head_dim + 4, indexer.heads, rank.times, rank.query

    def decode(batch: Array, context: Array) -> Array:
        scores = times.memory_bound(batch * context * size, batch * context * query * 4)
        return scores + times.memory_bound(batch * context * query * 4, batch * query * indexer.topk * 4)

    def prefill(batch: Array, new: Array, context: Array) -> Array:
        keys = np.maximum(context + new / 2, 1)
        scores = times.gemm(batch * new, keys, heads * indexer.head_dim, dtype="fp8")
        return scores + times.memory_bound(batch * new * keys * 4, batch * new * indexer.topk * 4)

    yield SequenceWork("indexer/scores", 1, decode, prefill)


def _compressed(rank: Rank, mixer: CompressedAttention) -> SequenceWork:
    """DeepSeek-V4: a window and the compressed entries, with one head of keys that serve as values."""
    heads, every = ceil_div(mixer.num_attention_heads, rank.layout.tp), mixer.compress
    top = mixer.indexer.topk if mixer.indexer else 0
    times, size, kv = rank.times, mixer.head_dim, rank.cache

    def met(context: Array) -> Array:
        entries = context / every if every else context * 0
        return np.minimum(context, mixer.window) + (np.minimum(entries, top) if top else entries)

    def decode(batch: Array, context: Array) -> Array:
        keys = met(context)
        return times.decode_attention(batch=batch, context=keys, heads=heads, kv_heads=1, head_dim=size, kv_dtype=kv)

    def prefill(batch: Array, new: Array, context: Array) -> Array:
        keys = met(context + new / 2)
        return times.context_attention(
            batch=batch, query=new, context=keys, heads=heads, kv_heads=1, head_dim=size, kv_dtype=kv, causal=False
        )

    return SequenceWork("attention/core", 1, decode, prefill)
