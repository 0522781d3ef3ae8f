"""torchtune's model, where it departs from transformers': keys and values repeated to all heads before the kernel, rotary positions as
pairs in fp32, a head that gives its logits in chunks whose losses are taken in fp32 one by one, and layers under torch.compile.

From torchtune 0.6.1 (torchtune/modules: attention.py, position_embeddings.py, transformer.py: chunked_output,
loss/ce_chunked_output_loss.py; training/_compile.py).
"""

from __future__ import annotations

from typing import Final

from calc.model.feed_forward import MLP
from calc.model.mixers import Attention
from calc.model.spec import Layer
from calc.model.weights import Dim, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.attention import kernel
from calc.training.autograd.builder import Builder
from calc.training.autograd.compiled_kernels import added, gated_down, shared
from calc.training.autograd.operators import FULL, ONE
from calc.training.autograd.tape import FIXED, Edge, Value, Weight
from calc.training.transformers.attention import named

CHUNKS: Final = 8  # num_output_chunks


def attention(b: Builder, x: Value, mixer: Attention, tables: Value) -> Value:
    """MultiHeadAttention."""
    t, weights, names = b.tape, mixer.parts[0].weights, mixer.modules
    a, k, d = dim("a", mixer.num_attention_heads), dim("k", mixer.num_key_value_heads), dim("d", mixer.head_dim)
    inputs = shared(t, x, 3) if b.settings.compiled else [x] * 3
    del x
    query = b.linear(inputs.pop(0), named(weights, "query"), a * d, "query", names[0])
    key = b.linear(inputs.pop(0), named(weights, "key"), k * d, "key", names[1])
    value = b.linear(inputs.pop(0), named(weights, "value"), k * d, "value", names[2])
    if mixer.q_norm:
        query = b.norm(query, mixer.q_norm, a)
    if mixer.k_norm:
        key = b.norm(key, mixer.k_norm, k)
    if b.settings.compiled:  # rotation and repetition are one kernel
        query, key = _fused(b, query, a * d, "turned_query"), _fused(b, key, a * d, "turned_key")
        value = _fused(b, value, a * d, "repeated_value") if k.size != a.size else value
    else:
        query, key = _turned(b, query, tables, "turned_query"), _turned(b, key, tables, "turned_key")
        if k.size != a.size:
            key, value = ops.copy(t, key, "repeated_key", a * d), ops.copy(t, value, "repeated_value", a * d)
    mixed = kernel(b, query, key, value, (a, a, d, d), 0)
    del query, key, value
    return b.linear(mixed, named(weights, "output"), dim("h", mixer.hidden_size), "output", names[3])


def _turned(b: Builder, x: Value, tables: Value, name: str) -> Value:
    """RotaryPositionalEmbeddings: pairs in fp32 times the cache's cosines and sines, stacked, and cast back."""
    t = b.tape
    half = Dim(x.dim.size // 2, rf"\frac{{{x.dim.latex}}}{{2}}", x.dim.numbers)
    with t.part("rotary"):
        wide = ops.cast(t, x, FULL, "fp32_input")
        first, second = ops.slices(t, wide, [half, half])
        parts = [
            ops.add(t, ops.mul(t, first, tables, "product"), ops.mul(t, second, tables, "product"), "turned")
            for _ in range(2)
        ]
        del wide, first, second
        return ops.cast(t, ops.join(t, parts, x.dim, "stacked"), x.bytes, name)


def _fused(b: Builder, x: Value, whole: Dim, name: str) -> Value:
    """One kernel of Inductor's that keeps nothing."""
    t = b.tape
    out = t.new(name, whole, x.extent, x.bytes)
    meta = (x.dim, x.extent, x.bytes)
    t.record([x], out, [], lambda g: (t.new("gradient", *meta),))
    return out


def compiled_layer(b: Builder, layer: Layer, x: Value, tables: Value) -> Value:
    """TransformerSelfAttentionLayer under torch.compile."""
    t, mixer, module = b.tape, layer.mixer, layer.feed_forward
    assert isinstance(mixer, Attention)
    assert isinstance(module, MLP)
    first, second = layer.norms
    with t.part("norms"):
        normal = ops.native_norm(t, x, b.vector(first), ONE, 1)
    with t.part("attention"):
        x = added(t, x, attention(b, normal, mixer, tables))
    del normal
    with t.part("norms"):
        normal = ops.native_norm(t, x, b.vector(second), ONE, 1)
    with t.part("mlp"):
        inputs = shared(t, normal, 2)
        del normal
        f, names = dim(module.letter, module.intermediate_size), module.modules
        both = [
            b.linear(inputs.pop(0), named(module.weights, name), f, name, names[place])
            for place, name in enumerate(("gate", "up"))
        ]
        down = b.weight(*named(module.weights, "down"))
        return added(t, x, gated_down(t, both.pop(0), both.pop(0), down, dim("h", module.hidden_size)))


def head_and_loss(b: Builder, x: Value, weight: Weight, vocabulary: Dim) -> Value:
    """The head's logits of all chunks, and the losses of each in fp32. A compiled loss keeps the logits instead of log-probabilities."""
    t, compiled = b.tape, b.settings.compiled_loss
    part, first = _part(vocabulary), [True]
    inputs = ops.split(t, x, [_part(x.dim)] * CHUNKS)
    with t.part("head"):
        logits = [t.new("logits", part, x.extent, x.bytes) for _ in range(CHUNKS)]
    meta = (x.extent, x.bytes)

    def backward(g: Value, *saved: Value) -> tuple[Value]:
        if not compiled:
            chosen = t.new("gradient", part, meta[0], FULL)
            wide = t.new("gradient", part, meta[0], FULL)
            del chosen
        gradient = t.new("gradient", part, *meta)
        if not compiled:
            del wide
        to_hidden = t.new("gradient", _part(x_dim), *meta)
        if weight.trains and first:  # the others' are added to it
            first.clear()
            ops.weight_gradient(t, weight)
        elif weight.trains:
            more = t.new("head_gradient", weight.dim, FIXED, weight.bytes)
            del more
        del gradient
        return (to_hidden,)

    x_dim, total = x.dim, None
    del x
    with t.part("loss"):
        while inputs:
            given, scores = inputs.pop(0), logits[CHUNKS - len(inputs) - 1]
            kept = _kept_of(b, scores, part)
            out = t.new("loss", ONE, FIXED, FULL)
            saved = [*kept, *([given] if weight.trains else [])]
            t.record([given, Edge() if weight.trains else None], out, saved, backward)
            total = out if total is None else ops.add(t, total, out, "loss_sum")
            del given, scores, kept, saved, out
    assert total is not None
    return total


def _kept_of(b: Builder, logits: Value, part: Dim) -> list[Value]:
    """What the loss of a chunk keeps."""
    t = b.tape
    if b.settings.compiled_loss:
        return [logits, *(t.new(name, ONE, logits.extent, FULL) for name in ("largest", "logarithm"))]
    wide = t.new("fp32_logits", part, logits.extent, FULL)
    log = t.new("log_probabilities", part, logits.extent, FULL)
    del wide
    return [log]


def whole_loss(b: Builder, logits: Value) -> Value:
    """Cross-entropy of all logits, which the model gives in fp32."""
    t = b.tape
    wide = ops.cast(t, logits, FULL, "fp32_logits")
    del logits
    out = t.new("loss", ONE, FIXED, FULL)
    if b.settings.compiled_loss:
        rows = [t.new(name, ONE, wide.extent, FULL) for name in ("largest", "logarithm")]
        ops.kernel(t, [wide], out, [wide, *rows])
    else:
        log = ops.softmax(t, wide, "log_probabilities", FULL)
        ops.kernel(t, [log], out, [log])
    return out


def _part(whole: Dim) -> Dim:
    """The share of one chunk."""
    return Dim(-(-whole.size // CHUNKS), rf"\lceil \frac{{{whole.latex}}}{{{CHUNKS}}} \rceil", whole.numbers)
