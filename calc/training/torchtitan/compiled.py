"""A layer of torchtitan under torch.compile: what Inductor's kernels materialise, and what is kept for backward.

PyTorch 2.13: the min-cut partitioner (torch/_functorch/partitioners.py) keeps what matmuls and attention need and does not compute
pointwise chains again that would have to be written for a matmul, so that the activated gate alone is not kept. Under a checkpoint
everything is recomputed but what the selection keeps and backward needs: the last matmul's output, which eager selection keeps, is not.
Kernels are fused: a norm with the addition before it, silu with its product and both their gradients. Complex numbers stay eager.
"""

from __future__ import annotations

from calc.model.feed_forward import MLP
from calc.model.mixers import Attention
from calc.model.spec import Layer
from calc.model.weights import Dim, Norm, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.attention import kernel
from calc.training.autograd.compiled_kernels import added, gated_down, shared
from calc.training.autograd.operators import FULL
from calc.training.autograd.tape import POSITIONS, Edge, Value
from calc.training.torchtitan.layers import TitanBuilder, turned


def compiled_layer(b: TitanBuilder, layer: Layer, x: Value, tables: Value) -> Value:
    """x + attention(norm(x)), and the same with the MLP: the additions are part of the kernels that follow them."""
    t = b.tape
    mixer, module = layer.mixer, layer.feed_forward
    assert isinstance(mixer, Attention)
    assert isinstance(module, MLP)
    first, second = layer.norms
    if b.model_class.torchtitan == "cosines":  # FSDP2 casts what a layer is given
        with t.part("attention"):
            tables = t.new("rotary_tables", Dim(2 * tables.dim.size, r"2 \cdot <d>", tables.dim.numbers), POSITIONS)
            b.argument = None if t.saving else tables
    with t.part("norms"):
        normal = b.rms(x, first)
    with t.part("attention"):
        x = added(t, x, _attention(b, normal, mixer, tables))
    del normal
    with t.part("norms"):
        normal = b.rms(x, second)
    with t.part("mlp"):
        return added(t, x, _mlp(b, normal, module))


def _attention(b: TitanBuilder, x: Value, mixer: Attention, tables: Value) -> Value:
    weights = mixer.parts[0].weights
    a, k, d = (
        b.local(dim("a", mixer.num_attention_heads)),
        b.kv_heads(mixer.num_key_value_heads),
        dim("d", mixer.head_dim),
    )
    inputs = shared(b.tape, b.gather(x), 3)
    del x
    query = b.matmul(inputs.pop(0), weights, "query", a * d)
    key = b.matmul(inputs.pop(0), weights, "key", k * d)
    value = b.matmul(inputs.pop(0), weights, "value", k * d)
    if b.model_class.torchtitan == "cosines":
        query = _normal_turned(b, query, mixer.q_norm, a, "turned_query")
        key = _normal_turned(b, key, mixer.k_norm, k, "turned_key")
    else:
        query, key = turned(b, query, key, tables)
    mixed = kernel(b, query, key, value, (a, k, d, d), 0)
    del query, key, value
    return b.scatter(b.matmul(mixed, weights, "output", dim("h", mixer.hidden_size)))


def _normal_turned(b: TitanBuilder, x: Value, norm: Norm | None, rows: Dim, name: str) -> Value:
    """Rotary positions by cosines and sines, with the heads' norm where there is one: one kernel."""
    t = b.tape
    with t.part("rotary"):
        out = t.like(x, name)
        kept = [x, t.new("inverse_root", rows, x.extent, FULL)] if norm else []
        weight = b.vector(norm) if norm else None

        def backward(g: Value, *saved: Value) -> tuple[Value]:
            made = t.like(g)
            if weight is not None:
                ops.weight_gradient(t, weight)
            return (made,)

        t.record([x, Edge()], out, kept, backward)
        return out


def _mlp(b: TitanBuilder, x: Value, module: MLP) -> Value:
    """down(silu(gate(x)) * up(x))"""
    f = b.local(dim(module.letter, module.intermediate_size))
    inputs = shared(b.tape, b.gather(x), 2)
    del x
    both = [b.matmul(inputs.pop(0), module.weights, name, f) for name in ("gate", "up")]
    weight = b.weight(*(found for found in module.weights if found.name == "down"))
    out = gated_down(b.tape, both.pop(0), both.pop(0), weight, dim("h", module.hidden_size))
    return b.scatter(out, keeps=False)
