"""The attention modules of transformers, written on a tape."""

from __future__ import annotations

from calc.model.mixers import Attention, CompressedAttention, LatentAttention
from calc.model.weights import Dim, Norm, dim
from calc.model.weights import Weight as ModelWeight
from calc.training.autograd import liger_operators as liger
from calc.training.autograd import operators as ops
from calc.training.autograd.attention import Heads, expanded, fused, kernel, merged, repeated, rotary
from calc.training.autograd.builder import Builder
from calc.training.autograd.operators import FULL, ONE
from calc.training.autograd.tape import PAIRS, Value
from calc.training.transformers.attention_sinks import shifted_softmax


def named(weights: tuple[ModelWeight, ...], *names: str) -> tuple[ModelWeight, ...]:
    wanted = {name for base in names for name in (base, f"{base}_bias")}
    return tuple(weight for weight in weights if weight.name in wanted)


def attention(b: Builder, x: Value, mixer: Attention, tables: Value) -> Value:
    """Projections, norms on heads, rotary positions, the kernel and the output projection."""
    t, weights = b.tape, mixer.parts[0].weights
    a, k = b.local(dim("a", mixer.num_attention_heads)), b.kv_heads(mixer.num_key_value_heads)
    d, d_v = dim("d", mixer.head_dim), dim("d_v" if mixer.v_head_dim != mixer.head_dim else "d", mixer.v_head_dim)
    gate = None
    names = mixer.modules
    if names[0] and names[0] == names[2]:
        parts = [a * d, k * d, k * d_v]
        whole = _sum(parts)
        joint = b.linear(x, named(weights, "query", "key", "value"), whole, "query_key_value", names[0])
        query, key, value = (ops.split if names[0] == "c_attn" else ops.slices)(t, joint, parts)
        del joint
    else:
        queries = dim("2", 2) * a * d if mixer.gated else a * d
        query = b.linear(x, named(weights, "query"), queries, "query", names[0])
        if b.model_class.scaled_queries:
            query = ops.scale(t, query, "query")
        if mixer.gated:
            query, gate = ops.split(t, query, [a * d, a * d])
        key = b.linear(x, named(weights, "key"), k * d, "key", names[1])
        value = key if mixer.key_is_value else b.linear(x, named(weights, "value"), k * d_v, "value", names[2])
    if mixer.q_norm:
        query = b.norm(query, mixer.q_norm, ONE if mixer.q_norm.size.size > mixer.head_dim else a)
    if mixer.k_norm:
        key = b.norm(key, mixer.k_norm, ONE if mixer.k_norm.size.size > mixer.head_dim else k)
    if mixer.v_norm:
        value = b.norm(value, mixer.v_norm, k)
    if mixer.rotary and b.settings.liger:
        query, key = liger.rotary(t, query, key)
    elif mixer.rotary:
        wide, sizes = b.model_class.fp32_rotary, (query.bytes, key.bytes)
        if wide:
            query, key = ops.cast(t, query, FULL, "fp32_query"), ops.cast(t, key, FULL, "fp32_key")
        query, key = _turned(b, query, a, mixer, tables, "query"), _turned(b, key, k, mixer, tables, "key")
        if wide:
            query, key = ops.cast(t, query, sizes[0], "query"), ops.cast(t, key, sizes[1], "key")
    window = mixer.window or mixer.chunk
    mixed = _attended(b, query, key, value, (a, k, d, d_v), window, mixer)
    if gate is not None:
        mixed = ops.mul(t, mixed, ops.unary(t, gate, "gate", "result"), "gated")
    return b.linear(mixed, named(weights, "output"), dim("h", mixer.hidden_size), "output", names[3])


def _turned(b: Builder, x: Value, heads: Dim, mixer: Attention, tables: Value, name: str) -> Value:
    """Rotary positions on a head, or on its first part, which is then joined to the rest again."""
    if not mixer.rotary_joined:
        return rotary(b, x, tables, name)
    width = mixer.rotary_dim or mixer.head_dim
    first, rest = heads * dim("d_r", width), heads * dim("d_p", mixer.head_dim - width)
    turned, passed = ops.slices(b.tape, x, [first, rest])
    return ops.join(b.tape, [rotary(b, turned, tables, "turned"), passed], heads * dim("d", mixer.head_dim), name)


def _sum(parts: list[Dim]) -> Dim:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole


def _attended(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    heads: Heads,
    window: int,
    mixer: Attention | None = None,
    joined: bool = False,
) -> Value:
    """Attention by transformers' own operators where it runs eager, else by PyTorch's kernels."""
    if b.settings.attention == "eager":
        return eager(b, query, key, value, heads, mixer)
    return kernel(b, query, key, value, heads, window, mixer, joined)


def eager(
    b: Builder, query: Value, key: Value, value: Value, heads: Heads, mixer: Attention | None, wide: bool = False
) -> Value:
    """transformers' eager attention: repeated heads, scores, an fp32 softmax, weights in the model's format.

    `wide`: queries and keys are cast to fp32 first, which autocast undoes.
    """
    t, (a, k, d, d_v) = b.tape, heads
    size = ops.matmul_bytes(t, value)
    if a.size != k.size:
        key, value = repeated(b, key, k, "repeated_key", a * d), repeated(b, value, k, "repeated_value", a * d_v)
    named = [key, value]  # by the function, until it returns
    wanted = query.bytes  # under autocast the rotary tables make it fp32, until the matmul
    if wide:
        query, key = ops.cast(t, query, FULL, "fp32_query"), ops.cast(t, key, FULL, "fp32_key")
        wanted = value.bytes
    made = size if t.autocast or not wide else FULL
    query, key = merged(b, ops.cast(t, query, made, "query")), merged(b, ops.cast(t, key, made, "key"))
    scores = t.new("scores", a, PAIRS, made)
    ops.kernel(t, [query, key], scores, [query, key] if query.grad else [])
    extent = query.extent
    del query, key  # what the matmul cast
    scores = ops.scale(t, scores, "scores")
    if mixer and mixer.softcap:
        scores = ops.scale(t, ops.unary(t, ops.scale(t, scores), "capped", "result"), "scores")
    raw = [ops.shift(t, scores, b.settings.bytes, "scores")]  # plus the mask, in the format of the embeddings
    del scores
    if mixer and (mixer.sinks or b.model_class.shifted_scores):
        weights = shifted_softmax(b, raw, named, a, mixer.sinks)
    else:
        native = mixer is not None and mixer.modules[0] == "c_attn"  # GPT-2's softmax names no format
        weights = ops.softmax(t, raw[0], "probabilities", None if native else FULL)
        weights = ops.cast(t, weights, wanted, "weights")
        raw.clear()
    weights = ops.dropout(t, weights, b.settings.probability("attention"), "weights")
    weights, value = ops.cast(t, weights, size, "weights"), merged(b, ops.cast(t, value, size, "value"))
    raw.clear()
    out = t.new("mixed", a * d_v, extent, size)
    ops.kernel(t, [weights, value], out, [weights, value] if weights.grad or value.grad else [])
    return ops.copy(t, out, "output_input")


def latent(b: Builder, x: Value, mixer: LatentAttention, tables: Value) -> Value:
    """Multi-head latent attention, its keys and values expanded to all heads (transformers trains it so)."""
    t, weights = b.tape, mixer.parts[0].weights
    a = b.local(dim("a", mixer.num_attention_heads))
    nope, rope, d_v = (
        dim("d_n", mixer.qk_nope_head_dim),
        dim("d_r", mixer.qk_rope_head_dim),
        dim("d_v", mixer.v_head_dim),
    )
    rank, r_q = dim("r_kv", mixer.kv_lora_rank), dim("r_q", mixer.q_lora_rank)
    norms = {norm.name: norm for norm in mixer.norms}
    if mixer.q_lora_rank:
        down = b.linear(x, named(weights, "query_down"), r_q, "query_down", "q_a_proj")
        down = b.norm(down, norms["q_norm"])
        query = b.linear(down, named(weights, "query_up"), a * (nope + rope), "query", "q_b_proj")
        del down
    else:
        query = b.linear(x, named(weights, "query"), a * (nope + rope), "query", "q_proj")
    passed, turned = ops.split(t, query, [a * nope, a * rope])
    latents = b.linear(x, named(weights, "key_value_down"), rank + rope, "latent", "kv_a_proj_with_mqa")
    low, key_rope = ops.split(t, latents, [rank, rope])
    low = b.norm(low, norms["kv_norm"])
    both = b.linear(low, named(weights, "key_value_up"), a * (nope + d_v), "key_value", "kv_b_proj")
    key_pass, value = ops.split(t, both, [a * nope, a * d_v])
    turned, key_rope = rotary(b, turned, tables, "query_rotary"), rotary(b, key_rope, tables, "key_rotary")
    query = ops.join(t, [passed, turned], a * (nope + rope), "query")
    key_rope = expanded(b, key_rope, a * rope)
    key = ops.join(t, [key_pass, key_rope], a * (nope + rope), "key")
    mixed = _attended(b, query, key, value, (a, a, nope + rope, d_v), 0, joined=True)
    return b.linear(mixed, named(weights, "output"), dim("h", mixer.hidden_size), "output", "o_proj")


def compressed(b: Builder, x: Value, mixer: CompressedAttention, tables: Value) -> Value:
    """DeepSeek-V4's attention as its projections around a fused kernel of one key-value head: an estimate of what is kept."""
    weights = mixer.parts[0].weights
    a, d, r_q = b.local(dim("a", mixer.num_attention_heads)), dim("d", mixer.head_dim), dim("r_q", mixer.q_lora_rank)
    low = b.linear(x, named(weights, "query_down"), r_q, "query_down", "q_a_proj")
    low = b.norm(low, Norm("query_norm", r_q, style=mixer.norm_style))
    query = b.linear(low, named(weights, "query_up"), a * d, "query", "q_b_proj")
    key = b.linear(x, named(weights, "key_value"), d, "key_value", "kv_proj")
    key = b.norm(key, Norm("key_value_norm", d, style=mixer.norm_style))
    query, key = rotary(b, query, tables, "query"), rotary(b, key, tables, "key")
    mixed = fused(b, query, key, key, (a, dim("1", 1), d, d), "flash")
    out = dim("g", mixer.o_groups) * dim("r_o", mixer.o_lora_rank)
    low = b.linear(mixed, named(weights, "output_down"), out, "output_down", "o_a_proj")
    return b.linear(low, named(weights, "output_up"), dim("h", mixer.hidden_size), "output", "o_b_proj")
