"""torchtitan's experts: a router, the tokens sorted by expert and padded, grouped matmuls, and their outputs weighted in fp32.

Under expert parallelism (torchtitan/distributed/expert_parallel.py) the sorted tokens go to the ranks of their experts and come back, each
time into a tensor that selective checkpoints keep. With experts that are whole on tensor-parallel ranks each of these routes its
share of the tokens (ReordererSequenceParallel). Experts are balanced: a rank receives as many tokens as it sends.
"""

from __future__ import annotations

from calc.model.feed_forward import MoE
from calc.model.weights import Dim, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.operators import FULL, LONG, ONE
from calc.training.autograd.tape import FIXED, Edge, Extent, Value, Weight
from calc.training.torchtitan.layers import TitanBuilder, mlp
from calc.units import ceil_div

INDEX = 4  # bytes of the places that padding gives the tokens


def moe(b: TitanBuilder, x: Value, module: MoE) -> Value:
    """Experts of their own for each token, and those that serve all."""
    t = b.tape
    k, h = dim("K", module.num_experts_per_tok), dim("h", module.hidden_size)
    x = b.gather(x)
    rows = Extent(1, 1, b.settings.tp) if b.settings.whole_experts else x.extent
    with t.part("router"):
        weights, chosen = _router(b, x, module, k)
        order = t.new("order", k, rows, LONG)
        sorted_weights = t.new("sorted_weights", k, rows, FULL)
        ops.kernel(t, [weights], sorted_weights, [order])
    with t.part("experts"):
        tokens = t.new("tokens", k, rows, LONG)
        routed = _taken(b, x, tokens, k * h, "routed", rows)
        places = (
            tokens if b.settings.experts_of < "2025-11" else None
        )  # where the outputs are added: the newest needs none
        del tokens
        out = (_sent if b.settings.ep > 1 or b.settings.whole_experts else _experts)(b, routed, module, k, h)
    if places:
        return b.scatter(_added(b, x, module, (out, sorted_weights, places)))
    shared = None
    if module.shared:
        with t.part("shared_expert"):
            shared = mlp(b, x, module.shared, between=False)
    with t.part("experts"):
        unsorted = _placed(b, out, order, "unsorted", x.extent)
        wide = ops.cast(t, unsorted, FULL, "fp32_outputs")
        mixed = t.new("mixed", h, x.extent, FULL)
        ops.kernel(t, [weights, wide], mixed, [weights, wide])
        del wide
        mixed = ops.cast(t, mixed, x.bytes, "mixed")
        made = mixed if shared is None else ops.add(t, shared, mixed, "sum")
    del chosen
    return b.scatter(made)


def _added(b: TitanBuilder, x: Value, module: MoE, routed: tuple[Value, Value, Value]) -> Value:
    """The outputs, each times its weight in fp32, added at their tokens to the shared expert's output (scatter_add). `routed`: the
    outputs, their weights and their tokens."""
    t = b.tape
    out, weights, tokens = routed
    with t.part("experts"):
        weighted = ops.mul(t, ops.cast(t, out, FULL, "fp32_outputs"), weights, "weighted")
        weighted = ops.cast(t, weighted, x.bytes, "weighted")
    with t.part("shared_expert"):
        shared = mlp(b, x, module.shared, between=False) if module.shared else t.like(x, "zeros")
    made = t.like(x, "sum")
    meta = (weighted.dim, weighted.extent, weighted.bytes)
    t.record([shared, weighted], made, [tokens], lambda g, *saved: (g, t.new("gradient", *meta)))
    return made


def _router(b: TitanBuilder, x: Value, module: MoE, k: Dim) -> tuple[Value, Value]:
    """The chosen experts' weights for each token, and who they are. Scores are made in fp32; a bias, no parameter, balances."""
    t, experts = b.tape, dim("E", module.num_experts)
    scores = ops.unary(
        t, ops.cast(t, b.matmul(x, module.router, "router", experts), FULL, "fp32_logits"), "scores", "result"
    )
    biased = t.like(scores, "biased")
    largest, chosen = t.new("largest", k, x.extent, FULL), t.new("chosen", k, x.extent, LONG)
    weights = t.new("weights", k, x.extent, FULL)
    ops.kernel(t, [scores], weights, [chosen])
    if b.model_class.torchtitan_normalised:
        weights = _normalised(b, weights)
    weights = ops.scale(t, weights, "scaled")
    del biased, largest
    return weights, chosen


def _normalised(b: TitanBuilder, weights: Value) -> Value:
    """Each weight by the sum of a token's: both are kept."""
    t = b.tape
    total = ops.shift(t, ops.mean(t, weights, ONE, "sum"), FULL, "sum")
    out = t.like(weights, "normalized")
    meta = (total.dim, total.extent, FULL)

    def backward(g: Value, *saved: Value) -> tuple[Value, Value]:
        to_weights = t.like(g)
        product = t.like(g)
        return to_weights, _summed(product)

    def _summed(product: Value) -> Value:
        return t.new("gradient", *meta)

    t.record([weights, total], out, [weights, total], backward)
    return out


def _taken(b: TitanBuilder, x: Value, places: Value, out_dim: Dim, name: str, rows: Extent | None = None) -> Value:
    """x[places]: the places are kept; backward adds into zeros."""
    t = b.tape
    out = t.new(name, out_dim, rows or x.extent, x.bytes)
    meta = (x.dim, x.extent, x.bytes)
    t.record([x], out, [places], lambda g, *saved: (t.new("gradient", *meta),))
    return out


def _placed(b: TitanBuilder, x: Value, places: Value, name: str, rows: Extent | None = None) -> Value:
    """empty[places] = x: the places are kept; backward takes the gradients from there."""
    t = b.tape
    out = t.new(name, x.dim, rows or x.extent, x.bytes)
    meta = (x.dim, x.extent, x.bytes)
    t.record([x], out, [places], lambda g, *saved: (t.new("gradient", *meta),))
    return out


def _exchanged(b: TitanBuilder, x: Value, name: str) -> Value:
    """An all-to-all: the tokens of other ranks in the place of this one's. Its gradient goes back the same way."""
    t = b.tape
    out = t.like(x, name)
    if b.settings.experts_of >= "2025-09":
        t.cache(out)
    t.record([x], out, [], lambda g: (t.like(g),))
    return out


def _sent(b: TitanBuilder, routed: Value, module: MoE, k: Dim, h: Dim) -> Value:
    """The tokens to the ranks of their experts, and what these make of them back. The caller holds the tokens that it sent."""
    if b.expert_tp > 1:
        routed = _summed_backward(b, routed)
    return _exchanged(b, _experts(b, _exchanged(b, routed, "received"), module, k, h), "returned")


def _summed_backward(b: TitanBuilder, x: Value) -> Value:
    """The same tensor, whose gradient is summed over the ranks that divide each expert."""
    t = b.tape
    out = t.view(x)
    t.record([x], out, [], lambda g: (t.like(g),))
    return out


def _experts(b: TitanBuilder, routed: Value, module: MoE, k: Dim, h: Dim) -> Value:
    """The grouped matmuls, between a copy of the tokens with a row of zeros for padding, and their return from it."""
    t, f = b.tape, dim(module.expert.letter, module.expert.intermediate_size)
    f = f if b.expert_tp == 1 else b.local(f)
    if b.expert_tp > 1 and b.settings.ep == 1:
        routed = _summed_backward(b, routed)
    places = t.new("places", k, routed.extent, INDEX)
    longer = ops.copy(t, routed, "with_zeros")
    x = _taken(b, longer, places, k * h, "padded")
    del longer
    ends = t.new("ends", dim("E", module.num_experts), FIXED, 4)
    inner = ops.unary(t, _grouped(b, x, module, "gate", k * f, ends), "activated")
    inner = ops.mul(t, inner, _grouped(b, x, module, "up", k * f, ends), "product")
    out = _grouped(b, inner, module, "down", k * h, ends)
    del inner, x
    out = _placed(b, out, places, "outputs")
    back = t.view(out)
    meta = (out.dim, out.extent, out.bytes)
    t.record([out], back, [], lambda g: (t.new("gradient", *meta),))  # without the row of zeros
    return back


def _grouped(b: TitanBuilder, x: Value, module: MoE, name: str, out_dim: Dim, ends: Value) -> Value:
    """torch's grouped matmul over all experts: it keeps its input and where each expert's tokens end."""
    t = b.tape
    found = tuple(weight for weight in module.expert.weights if weight.name == name)
    ranks = b.settings.ep * (b.settings.tp // b.expert_tp)
    weight = b.weight(*found, copies=ceil_div(module.num_experts, ranks), tp=b.expert_tp)
    weight = Weight(name, weight.dim, weight.trains, weight.bytes)
    out = t.new(name, out_dim, x.extent, x.bytes)
    meta = (x.dim, x.extent, x.bytes)

    def backward(g: Value, *saved: Value) -> tuple[Value]:
        made = t.new("gradient", *meta)
        ops.weight_gradient(t, weight)
        return (made,)

    t.record([x, Edge()], out, [x, ends], backward)
    return out
