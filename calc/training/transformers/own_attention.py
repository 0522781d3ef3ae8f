"""Attention modules that model classes of transformers write by themselves: BLOOM's, Falcon's, GPT-J's."""

from __future__ import annotations

from collections.abc import Callable

from calc.model.mixers import Attention
from calc.model.weights import Dim, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.attention import Heads, expanded, fused, mathematics, merged, rotary
from calc.training.autograd.builder import Builder
from calc.training.autograd.operators import FULL, HALF, LONG, ONE
from calc.training.autograd.tape import FIXED, PAIRS, POSITIONS, Value
from calc.training.model_classes import Modeling
from calc.training.transformers.attention import eager, named


def _joint(b: Builder, x: Value, mixer: Attention, out: Dim) -> Value:
    weights = named(mixer.parts[0].weights, "query", "key", "value")
    return b.linear(x, weights, out, "query_key_value", mixer.modules[0])


def _output(b: Builder, x: Value, mixer: Attention) -> Value:
    weights = named(mixer.parts[0].weights, "output")
    return b.linear(x, weights, dim("h", mixer.hidden_size), "output", mixer.modules[3])


def bloom(b: Builder, x: Value, mixer: Attention, tables: Value) -> Value:
    """BLOOM: scores made on top of the ALiBi biases, an fp32 softmax; queries, keys and values are taken from one tensor, by
    copies where there are several sequences."""
    t, several = b.tape, b.settings.several
    a = b.local(dim("a", mixer.num_attention_heads))
    width = a * dim("d", mixer.head_dim)
    joint = _joint(b, x, mixer, width + width + width)
    parts = ops.slices(t, joint, [width, width, width])
    query, key, value = (ops.copy(t, part, "heads") for part in parts) if several else parts
    scores = t.new("scores", a, PAIRS, query.bytes)
    meta = (query.dim, query.extent, query.bytes)

    def backward(g: Value, *saved: Value) -> list[Value]:
        made = []
        for _ in saved:
            product = t.new("gradient", *meta)
            made.append(t.like(product))  # times the scale
            del product
        return made

    t.record([query, key], scores, [query, key], backward)
    masked = ops.shift(t, scores, b.settings.bytes, "scores")
    weights = ops.cast(t, ops.softmax(t, masked, "probabilities", FULL), query.bytes, "weights")
    weights = ops.dropout(t, weights, b.settings.probability("attention"), "weights")
    mixed = t.new("mixed", width, query.extent, query.bytes)
    ops.kernel(t, [weights, value], mixed, [weights, value])
    mixed = ops.copy(t, mixed, "output_input")
    return _output(b, mixed, mixer)


def _index(b: Builder, x: Value, part: Dim, name: str) -> Value:
    """x[..., [i], :], a copy by an index; its gradient is put into zeros of the whole."""
    t = b.tape
    out = t.new(name, part, x.extent, x.bytes)
    index = t.new("index", ONE, FIXED, LONG)
    meta = (x.dim, x.extent, x.bytes)
    t.record([x], out, [index], lambda g, *saved: (t.new("gradient", *meta),))
    return out


def falcon(b: Builder, x: Value, mixer: Attention, tables: Value) -> Value:
    """Falcon: a mask is always given, so that flash attention cannot run. Grouped heads are copied for every query head, one
    head for all falls to plain mathematics."""
    t = b.tape
    a, k, d = (
        b.local(dim("a", mixer.num_attention_heads)),
        b.kv_heads(mixer.num_key_value_heads),
        dim("d", mixer.head_dim),
    )
    grouped = 1 < k.size < a.size
    joint = _joint(b, x, mixer, a * d + k * d + k * d)
    if k.size == a.size:
        query, key, value = ops.slices(t, joint, [a * d, a * d, a * d])
    else:
        (query,) = ops.slices(t, joint, [a * d])
        key, value = _index(b, joint, k * d, "key"), _index(b, joint, k * d, "value")
    if grouped:
        query = ops.copy(t, query, "query")
        key, value = ops.copy(t, key, "repeated_key", a * d), ops.copy(t, value, "repeated_value", a * d)
        k = a
    if mixer.rotary:
        query, key = rotary(b, query, tables, "query"), rotary(b, key, tables, "key")
    heads = (a, k, d, d)
    if b.settings.attention == "eager":
        return _output(b, _falcon_eager(b, query, key, value, heads, x.bytes), mixer)
    size = ops.matmul_bytes(t, query)
    query, key, value = (ops.cast(t, x, size, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    if b.settings.attention == "flash":
        mixed = fused(b, query, key, value, heads, "flash")
    elif k.size == a.size:
        mixed = fused(b, query, key, value, heads, "efficient", masked=True)
    else:
        mask = t.new("mask", ONE, PAIRS, size)
        mixed = mathematics(b, query, key, value, heads)
        del mask
    return _output(b, mixed, mixer)


def _falcon_eager(b: Builder, query: Value, key: Value, value: Value, heads: Heads, softmax: int) -> Value:
    """Scores scaled in place, a softmax in the format of the layer's input, no dropout."""
    t, (a, k, d, _) = b.tape, heads
    size = ops.matmul_bytes(t, value)

    def seen_by_all(x: Value, name: str) -> Value:
        x = ops.cast(t, x, size, name)
        if k.size == a.size:
            return merged(b, x)
        return ops.copy(t, x, name, a * d) if b.settings.several else expanded(b, x, a * d)

    query, key = merged(b, ops.cast(t, query, size, "query")), seen_by_all(key, "key")
    scores = t.new("scores", a, PAIRS, size)
    ops.kernel(t, [query, key], scores, [query, key] if query.grad else [])
    masked = ops.shift(t, scores, b.settings.bytes, "scores")
    weights = ops.softmax(t, masked, "weights", softmax)
    weights, value = ops.cast(t, weights, size, "weights"), seen_by_all(value, "value")
    mixed = t.new("mixed", a * d, query.extent, size)
    ops.kernel(t, [weights, value], mixed, [weights, value])
    return ops.copy(t, mixed, "output_input")


def gptj(b: Builder, x: Value, mixer: Attention, tables: Value) -> Value:
    """GPT-J: each turn repeats its half of the sines and cosines for itself, and keeps them."""
    t, weights = b.tape, mixer.parts[0].weights
    a, d = b.local(dim("a", mixer.num_attention_heads)), dim("d", mixer.head_dim)
    names = ("query", "key", "value")
    query, key, value = (
        b.linear(x, named(weights, name), a * d, name, mixer.modules[at]) for at, name in enumerate(names)
    )
    width = dim("d_r", mixer.rotary_dim)

    def turned(x: Value, name: str) -> Value:
        first = x
        if mixer.rotary_joined:
            passed = dim("d_p", mixer.head_dim - mixer.rotary_dim)
            first, rest = ops.slices(t, x, [a * width, a * passed])
        sines, cosines = (t.new(table, width, POSITIONS, b.settings.bytes) for table in ("sines", "cosines"))
        first = rotary(b, first, cosines, "turned", sines)
        return ops.join(t, [first, rest], a * d, name) if mixer.rotary_joined else first

    key = turned(key, "key")
    query = turned(query, "query")
    heads = (a, a, d, d)
    if b.settings.attention == "eager":
        mixed = eager(b, query, key, value, heads, mixer, wide=True)
    else:
        size = ops.matmul_bytes(t, query)
        query, key, value = (ops.cast(t, x, size, name) for x, name in zip((query, key, value), names, strict=True))
        kernel = "flash" if size == HALF and d.size <= 256 else "efficient"
        mixed = fused(b, query, key, value, heads, kernel)
    return _output(b, mixed, mixer)


ATTENTIONS: dict[Modeling, Callable[[Builder, Value, Attention, Value], Value]] = {
    "bloom": bloom,
    "falcon": falcon,
    "gptj": gptj,
}
