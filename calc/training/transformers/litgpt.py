"""litgpt's model, where it departs from transformers': one projection for queries, keys and values with its own LoRA, heads joined
after their rotation, and a head that gives its logits in chunks, whose losses are taken chunk by chunk in the model's format.

From litgpt 0.3.1 (litgpt/model.py, lora.py, utils.py: chunked_cross_entropy, finetune/lora.py: lm_head_chunk_size=128).
"""

from __future__ import annotations

from dataclasses import replace

from calc.model.mixers import Attention
from calc.model.weights import Dim, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.adapters import quantised_linear, scaled
from calc.training.autograd.attention import kernel, rotary
from calc.training.autograd.builder import Builder
from calc.training.autograd.operators import FULL, LONG, ONE
from calc.training.autograd.tape import FIXED, POSITIONS, Edge, Value, Weight
from calc.training.states.tensors import Lora
from calc.training.transformers.attention import named


def attention(b: Builder, x: Value, mixer: Attention, tables: Value) -> Value:
    """CausalSelfAttention: queries, keys and values are views of one projection's output, which SDPA keeps whole for the values."""
    t, weights = b.tape, mixer.parts[0].weights
    a, k, d = (
        b.local(dim("a", mixer.num_attention_heads)),
        b.kv_heads(mixer.num_key_value_heads),
        dim("d", mixer.head_dim),
    )
    whole = a * d + k * d + k * d
    joint = _projection(b, x, mixer, whole)
    query, key, value = ops.split(t, joint, [a * d, k * d, k * d])
    if k.size != a.size:  # queries of a group do not lie apart evenly, keys and values are repeated
        query = ops.copy(t, query, "query", a * d)
        key, value = ops.copy(t, key, "repeated_key", a * d), ops.copy(t, value, "repeated_value", a * d)
    del joint
    width = (mixer.rotary_dim or mixer.head_dim) if mixer.rotary else 0
    query, key = _turned(b, query, a, width, d, tables), _turned(b, key, a, width, d, tables)
    lora = b.settings.lora
    prompted = lora is not None and lora.prompts and not b.settings.frozen
    mixed = kernel(b, query, key, value, (a, a, d, d), 0, mixer, joined=not prompted)
    if prompted:
        mixed = _prompted(b, query, mixed, a)
    del query, key, value
    return b.linear(mixed, named(weights, "output"), dim("h", mixer.hidden_size), "output", mixer.modules[3])


def _prompted(b: Builder, query: Value, mixed: Value, heads: Dim) -> Value:
    """LLaMA-Adapter: the queries read ten learned prompts as well, and a gate weighs what they find. Ten is no multiple of eight, so that
    SDPA's mask is padded for its efficient kernel; the prompts' own keys and values are too few to count."""
    t = b.tape
    with t.part("prompts"):
        found = t.new("prompted", mixed.dim, query.extent, query.bytes)
        sums = t.new("logsumexp", heads, query.extent, FULL)
        mask = t.new("mask", dim("16", 16), POSITIONS, query.bytes)
        meta = (query.dim, query.extent, query.bytes) if query.grad else None

        def read(g: Value, *saved: Value) -> tuple[Value | None, None]:
            return (t.new("gradient", *meta) if meta else None), None

        t.record([query, Edge()], found, [query, found, sums, mask], read)
        del query, sums, mask
        gated = t.like(found, "gated")

        def gate(g: Value, *saved: Value) -> tuple[Value, None]:
            to_found = t.like(g)
            product = t.like(g)
            del product
            return to_found, None

        t.record([found, Edge()], gated, [found], gate)
        del found
        return ops.add(t, mixed, gated, "output_input")


def _turned(b: Builder, x: Value, heads: Dim, width: int, d: Dim, tables: Value) -> Value:
    """The turned part of each head, joined to the rest, of which there may be none: a copy all the same."""
    if not width:
        return x
    first = heads * dim("d_r", width)
    (part,) = ops.slices(b.tape, x, [first])
    turned = rotary(b, part, tables, "turned")
    if width == d.size:
        return ops.join(b.tape, [turned], heads * d, "joined")
    (rest,) = ops.slices(b.tape, x, [heads * dim("d_p", d.size - width)])
    return ops.join(b.tape, [turned, rest], heads * d, "joined")


def _projection(b: Builder, x: Value, mixer: Attention, out: Dim) -> Value:
    """LoRAQKVLinear: the projection, plus its update at the places of those that are adapted."""
    t, lora = b.tape, b.settings.lora
    matrices = named(mixer.parts[0].weights, "query", "key", "value")
    weight = b.weight(*(each for each in matrices if each.matmul))
    biases = tuple(each for each in matrices if not each.matmul)
    if lora and lora.quantised:
        y = quantised_linear(t, x, weight, out, "query_key_value", lora)
    else:
        y = ops.linear(t, x, weight, out, "query_key_value", b.weight(*biases) if biases else None)
    if lora and lora.scales and not b.settings.frozen:
        return scaled(t, y, "query_key_value")
    return _updated(b, x, y, mixer, lora) if lora else y


def _updated(b: Builder, x: Value, y: Value, mixer: Attention, lora: Lora) -> Value:
    t = b.tape
    adapted = lora.litgpt_outputs(mixer)
    if not adapted:
        return y
    rank, total = dim("r", lora.rank * len(adapted)), dim("d_out", sum(adapted))
    down = Weight("lora_A", rank * dim("h", mixer.hidden_size), True, lora.width)
    up = Weight("lora_B", dim("r", lora.rank) * total, True, lora.width)
    with t.part("adapter"):
        dropped = ops.dropout(t, x, lora.dropout, "adapter_dropped")
        low = ops.linear(t, dropped, down, rank, "lora_A")
        high = ops.linear(t, low, up, total, "lora_B")  # conv1d with a group for each
        del dropped, low
        if len(adapted) < 3:  # zero_pad: index_copy_ keeps what it copies
            padded = t.new("padded", y.dim, y.extent, y.bytes)
            meta = (high.dim, high.extent, high.bytes)
            t.record([high], padded, [high], lambda g, *saved: (t.new("gradient", *meta),))
            high = padded
            del padded
        return ops.add(t, y, ops.scale(t, high, "scaled"), "adapted")


CHUNK = 128  # tokens of a sequence whose logits are one tensor


def head_and_loss(b: Builder, x: Value, weight: Weight, vocabulary: Dim) -> Value:
    """The logits of all chunks, which the caller holds, and of each its log-probabilities, in the model's format; backward takes a
    chunk at a time."""
    t, lora = b.tape, b.settings.lora
    chunk = Dim(vocabulary.size * CHUNK, rf"{CHUNK} \cdot {vocabulary.latex}", vocabulary.numbers)
    blank = Value(t, x.storage, x.dim, None)  # the graph is joined below
    with t.part("head"):
        if lora and lora.quantised:
            logits = quantised_linear(t, blank, weight, vocabulary, "logits", lora)
        else:
            logits = ops.linear(t, blank, replace(weight, trains=False), vocabulary, "logits")
        shifted = []
        if lora and lora.litgpt_adapts("head"):
            shifted = _head_update(b, x, vocabulary, chunk, lora)
        if lora and lora.scales:
            shifted = [t.like(logits, "shifted")]
            logits = t.like(logits, "scaled")
    with t.part("loss"):
        labels = t.new("labels", ONE, x.extent, LONG)
        log = t.like(logits, "log_probabilities")
        out = t.new("loss", ONE, FIXED, logits.bytes)

    meta = (x.dim, x.extent, x.bytes)
    adapters = _head_adapters(x, vocabulary, lora) if lora and lora.litgpt_adapts("head") else ()
    chunks = 3 if adapters else 2  # the update's gradient is scaled

    def backward(g: Value, *saved: Value) -> tuple[Value]:
        made = t.new("gradient", *meta)
        parts = [t.new("chunk_gradient", chunk, FIXED, meta[2]) for _ in range(chunks)]
        parts.clear()
        if weight.trains:
            ops.weight_gradient(t, weight)
        for adapter in adapters:
            ops.weight_gradient(t, adapter)
        return (made,)

    kept = [log, labels, *shifted, *([x] if weight.trains or (lora and lora.keeps_input) else [])]
    t.record([x], out, kept, backward)
    return out


def _head_adapters(x: Value, vocabulary: Dim, lora: Lora) -> tuple[Weight, Weight]:
    rank = dim("r", lora.rank)
    return (
        Weight("head_lora_A", rank * x.dim, True, lora.width),
        Weight("head_lora_B", rank * vocabulary, True, lora.width),
    )


def _head_update(b: Builder, x: Value, vocabulary: Dim, chunk: Dim, lora: Lora) -> list[Value]:
    """What the head's adapter keeps of all chunks: the dropped input with its mask, and A's outputs. Of a chunk its logits without the
    update and the update, before and after scaling, live while they are added."""
    t = b.tape
    with t.part("adapter"):
        kept = [t.like(x, "adapter_dropped"), t.like(x, "adapter_dropped_mask", 1)] if lora.dropout else [t.view(x)]
        kept.append(t.new("lora_A", dim("r", lora.rank), x.extent, x.bytes))
        passing = [t.new(name, chunk, FIXED, x.bytes) for name in ("plain", "update", "scaled")]
        passing.clear()
    return kept
