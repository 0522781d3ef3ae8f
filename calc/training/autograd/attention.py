"""PyTorch's attention kernels on a tape, as CUDA picks them, and rotary positions turned by tables."""

from __future__ import annotations

from calc.model.mixers import Attention
from calc.model.weights import Dim, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.builder import Builder
from calc.training.autograd.operators import FULL, HALF, LONG, ONE
from calc.training.autograd.tape import FIXED, PAIRS, Value

Heads = tuple[Dim, Dim, Dim, Dim]  # query heads, key heads, head size, value head size


def rotary(b: Builder, x: Value, tables: Value, name: str, sines: Value | None = None) -> Value:
    """x * cos + rotate_half(x) * sin; the tables are the model's own and counted once, or the layer's with its `sines`."""
    t = b.tape
    half = Dim(x.dim.size // 2, rf"\frac{{{x.dim.latex}}}{{2}}", x.dim.numbers)

    def turned() -> Value:
        first, second = ops.slices(t, x, [half, half])
        return ops.join(t, [ops.scale(t, second), first], x.dim, "rotated")

    return ops.add(t, ops.mul(t, x, tables, "cosine"), ops.mul(t, turned(), sines or tables, "sine"), name)


def kernel(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    heads: Heads,
    window: int,
    mixer: Attention | None = None,
    joined: bool = False,
) -> Value:
    """Attention by the kernel that CUDA picks: flash for 16 bits, one head size and no mask; the efficient kernel for other
    sizes, masks and fp32 where all heads are equal; plain mathematics for the rest (PyTorch 2.13, sdp_utils.cpp)."""
    t, settings = b.tape, b.settings
    a, k, d, d_v = heads
    masked = 0 < window <= settings.longest_masked and settings.attention != "flash"
    size = HALF if settings.autocast else query.bytes
    grouped = a.size != k.size
    flash = settings.attention == "flash" or (size == HALF and not masked and d.size == d_v.size and d.size <= 256)
    if grouped and not flash and (masked or d.size != d_v.size or d.size > 256):  # transformers repeats the heads
        key, value = repeated(b, key, k, "repeated_key", a * d), repeated(b, value, k, "repeated_value", a * d_v)
        grouped = False
    query, key, value = (ops.cast(t, x, size, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    if flash:
        mixed = fused(b, query, key, value, heads, "flash")
        # flash answers in the layout of the query; after a join that is head by head, and the output is copied
        joined = joined or (mixer is not None and mixer.rotary and mixer.rotary_joined and not settings.liger)
        return ops.copy(t, mixed, "output_input") if joined else mixed
    if not grouped:
        return fused(b, query, key, value, heads, "efficient", masked)
    return mathematics(b, query, key, value, heads)


def fused(b: Builder, query: Value, key: Value, value: Value, heads: Heads, name: str, masked: bool = False) -> Value:
    t, (a, _, _, d_v) = b.tape, heads
    out = t.new("mixed", a * d_v, query.extent, query.bytes)
    sums = t.new("logsumexp", a, query.extent, FULL)
    seeds = [t.new("seed", dim("2", 2) if name == "flash" else ONE, FIXED, LONG), t.new("offset", ONE, FIXED, LONG)]
    bias = [t.new("mask", ONE, PAIRS, query.bytes)] if masked else []
    t.cache(out, sums, *seeds)
    ops.kernel(
        t, [query, key, value], out, [query, key, value, out, sums, *seeds, *bias] if query.grad or value.grad else []
    )
    return out


def repeated(b: Builder, x: Value, heads: Dim, name: str, whole: Dim) -> Value:
    """transformers' repeat_kv: a copy for every query head; a single head is only seen by all."""
    return expanded(b, x, whole) if heads.size == 1 else ops.copy(b.tape, x, name, whole)


def mathematics(b: Builder, query: Value, key: Value, value: Value, heads: Heads) -> Value:
    """PyTorch's plain composition: everything in fp32, all scores kept."""
    t, (a, _, d, d_v) = b.tape, heads
    kept = query.bytes
    query, key, value = (ops.cast(t, x, FULL) for x in (query, key, value))
    query = ops.scale(t, query, "query")
    key = ops.copy(t, key, "repeated_key", a * d)
    value = ops.copy(t, value, "repeated_value", a * d_v)
    key = ops.scale(t, key, "repeated_key")
    scores = t.new("scores", a, PAIRS, FULL)
    ops.kernel(t, [query, key], scores, [query, key])
    weights = ops.softmax(t, scores, "weights")
    del scores
    out = t.new("mixed", a * d_v, query.extent, FULL)
    ops.kernel(t, [weights, value], out, [weights, value])
    return ops.copy(t, ops.cast(t, out, kept), "output_input")


def merged(b: Builder, x: Value) -> Value:
    """Batch and heads as one dimension, which a batched matmul wants: a copy of heads that are a part of a fused tensor, or
    one head seen by all, where there are several sequences."""
    apart = x.storage.dim.size != x.dim.size
    return ops.copy(b.tape, x, "heads") if apart and b.settings.several else x


def expanded(b: Builder, x: Value, whole: Dim) -> Value:
    """`expand`: the same memory seen by every head; backward sums over the heads."""
    view = Value(b.tape, x.storage, whole, None)
    meta = (x.dim, x.extent, x.bytes)
    b.tape.record([x], view, [], lambda g: (b.tape.new("gradient", *meta),))
    return view
