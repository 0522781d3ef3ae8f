"""Gemma 4's feed-forward: an MLP and, where the model has experts, these too, each between norms of its own."""

from __future__ import annotations

from calc.model.feed_forward import MoE
from calc.model.spec import Layer
from calc.model.weights import Norm, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.builder import Builder
from calc.training.autograd.operators import FULL, LONG, ONE
from calc.training.autograd.tape import Edge, Value
from calc.training.transformers.feed_forward import experts, mlp


def feed(b: Builder, x: Value, layer: Layer) -> Value:
    """What joins the residual after the attention."""
    t, module = b.tape, layer.feed_forward
    norms = {norm.name: norm for norm in layer.norms}

    def normed(value: Value, name: str) -> Value:
        with t.part("norms"):
            return b.norm(value, norms[name])

    inner = normed(x, "pre_feedforward_norm")
    if not isinstance(module, MoE):
        assert module is not None
        with t.part("mlp"):
            inner = mlp(b, inner, module)
        return normed(inner, "post_feedforward_norm")
    assert module.shared is not None
    with t.part("shared_expert"):
        inner = mlp(b, inner, module.shared)
    plain = normed(inner, "post_feedforward_norm_1")
    with t.part("router"):
        scores = _router(b, x, module)
    other = normed(x, "pre_feedforward_norm_2")
    with t.part("experts"):
        other = experts(b, other, scores, module, dim("K", module.num_experts_per_tok), dim("h", module.hidden_size))
    other = normed(other, "post_feedforward_norm_2")
    inner = ops.add(t, plain, other, "sum")
    return normed(inner, "post_feedforward_norm")


def _router(b: Builder, x: Value, module: MoE) -> Value:
    """Softmax over all experts in fp32, the best of them normalised in place, times a learned scale of each expert."""
    t, h = b.tape, dim("h", module.hidden_size)
    weights = {weight.name: weight for weight in module.router}
    x = b.norm(x, Norm("norm", h, style="powered", weight=False))
    x = ops.scale(t, ops.mul_weight(t, x, b.weight(weights["scale"])), "scaled")
    chosen_of, one_of = dim("K", module.num_experts_per_tok), dim("E", module.num_experts)
    logits = ops.linear(t, x, b.weight(weights["router"]), one_of, "logits")
    probabilities = ops.softmax(t, logits, "probabilities", FULL)
    chosen = t.new("chosen", chosen_of, x.extent, LONG)
    best = t.new("chosen_probabilities", chosen_of, x.extent, FULL)
    ops.kernel(t, [probabilities], best, [chosen] if probabilities.grad else [])
    normal = t.view(best)  # divided in place: what was there is kept as a copy
    copy = t.like(best, "before_division") if best.grad else None
    total = t.new("their_sum", ONE, x.extent, FULL)
    ops.kernel(t, [best], normal, [copy, total] if copy else [])
    scales = b.weight(weights["expert_scale"])
    taken = t.new("expert_scales", chosen_of, x.extent, scales.bytes)

    def backward(g: Value, *saved: Value) -> tuple[None]:
        ops.weight_gradient(t, scales)
        return (None,)

    t.record([Edge() if scales.trains else None], taken, [chosen] if scales.trains else [], backward)
    return ops.mul(t, normal, taken, "scores")
