"""The feed-forward modules of transformers, written on a tape: MLPs, routers and grouped experts."""

from __future__ import annotations

from dataclasses import dataclass

from calc.model.feed_forward import MLP, MoE
from calc.model.weights import Dim, dim
from calc.training.autograd import liger_operators as liger
from calc.training.autograd import operators as ops
from calc.training.autograd.builder import Builder
from calc.training.autograd.operators import FULL, HALF, LONG, ONE
from calc.training.autograd.tape import FIXED, Edge, Value, Weight
from calc.training.model_classes import Router as RouterName


def _gelu_new(b: Builder, x: Value) -> Value:
    """0.5 x (1 + tanh(c (x + 0.044715 x ** 3))), operator by operator."""
    t = b.tape
    half = ops.scale(t, x, "half")
    inner = ops.scale(t, ops.add(t, x, ops.scale(t, ops.power(t, x))))
    one = ops.scale(t, ops.unary(t, inner, "tanh", "result"), "one_plus_tanh")
    return ops.mul(t, half, one, "activated")


def _relu_squared(b: Builder, x: Value) -> Value:
    return ops.power(b.tape, ops.unary(b.tape, x, "relu", "result"), "activated")


def _quick_gelu(b: Builder, x: Value) -> Value:
    t = b.tape
    return ops.mul(t, x, ops.unary(t, ops.scale(t, x), "sigmoid", "result"), "activated")


def _bloom_gelu(b: Builder, x: Value) -> Value:
    """BLOOM's own function: it keeps its input, and computes the tanh again in backward."""
    t = b.tape
    out = t.like(x, "activated")

    def made(*operands: Value) -> Value:  # the operands live as long as the operator runs
        return t.like(operands[0], "gelu")

    def backward(g: Value, *saved: Value) -> tuple[Value]:
        x = saved[0] if saved else g
        inner = made(made(made(x), made(made(made(x), x))))
        slope = made(made(made(made(x), made(made(made(inner, inner)), made(made(made(x), x))))), made(made(inner)))
        return (made(slope, g),)

    t.record([x], out, [x], backward)
    return out


_COMPOSED = {
    "bloom_gelu": _bloom_gelu,
    "gelu_new": _gelu_new,
    "gelu_fast": _gelu_new,
    "relu2": _relu_squared,
    "relu_squared": _relu_squared,
    "quick_gelu": _quick_gelu,
}


def activate(b: Builder, x: Value, name: str) -> Value:
    """The activation function: one operator that saves its input (silu, gelu) or its result (relu), or a composition."""
    if name in _COMPOSED and not b.settings.litgpt:  # litgpt has PyTorch's own, tanh and all
        return _COMPOSED[name](b, x)
    return ops.unary(b.tape, x, "activated", "result" if name == "relu" else "input")


def mlp(b: Builder, x: Value, module: MLP) -> Value:
    """down(act(gate(x)) * up(x)), or down(act(up(x)))."""
    t, h = b.tape, dim("h", module.hidden_size)
    f = b.local(dim(module.letter, module.intermediate_size))
    by_name = {
        name: tuple(w for w in module.weights if w.name in (name, f"{name}_bias")) for name in ("gate", "up", "down")
    }
    names = module.modules
    if not module.gated:
        inner = activate(b, b.linear(x, by_name["up"], f, "up", names[1]), module.activation)
    elif names[0] == names[1] and not b.settings.litgpt:  # litgpt has them apart
        both = b.linear(x, (*by_name["gate"], *by_name["up"]), dim("2", 2) * f, "gate_up", names[0])
        gate, up = ops.split(t, both, [f, f])
        del both
        inner = (
            liger.gated(t, gate, up)
            if b.settings.liger
            else ops.mul(t, up, activate(b, gate, module.activation), "product")
        )
        del gate, up
    elif b.settings.liger:
        gate = b.linear(x, by_name["gate"], f, "gate", names[0])
        inner = liger.gated(t, gate, b.linear(x, by_name["up"], f, "up", names[1]))
        del gate
    else:
        gate = activate(b, b.linear(x, by_name["gate"], f, "gate", names[0]), module.activation)
        inner = ops.mul(t, gate, b.linear(x, by_name["up"], f, "up", names[1]), "product")
        del gate
    return b.linear(inner, by_name["down"], h, "down", names[2])


# What routers save besides their input: bytes for each expert and for each chosen expert of a token, by their kind.
# (name, bytes, counted over): traced from transformers 5.24.
Rows = tuple[tuple[str, int, str], ...]
_SOFTMAX: Rows = (("probabilities", FULL, "E"), ("chosen", LONG, "K"))
_NORMALISED: Rows = (*_SOFTMAX, ("chosen_probabilities", FULL, "K"), ("their_sum", FULL, "1"))


@dataclass(frozen=True, slots=True)
class Router:
    """What a model class's router keeps: its rows, whether it computes in fp32, and whether the experts' weights stay so.

    `sigmoid`: what is made of the logits has their format, which autocast narrows; the sum alone is fp32.
    `clamped`: its experts clamp gate and up, and gate with gate * sigmoid(alpha * gate) * (up + 1).
    """

    rows: Rows
    wide: bool = False
    wide_scores: bool = False
    sigmoid: bool = False
    clamped: bool = False


ROUTERS: dict[RouterName, Router] = {
    "usual": Router(_NORMALISED),
    "mixtral": Router(_NORMALISED, wide_scores=True),
    "clamped": Router((("chosen", LONG, "K"), ("chosen_probabilities", HALF, "K")), clamped=True),
    "fp32": Router(_SOFTMAX, wide=True, wide_scores=True),
    "fp32_corrected": Router(_NORMALISED, wide=True, sigmoid=True),
}


def moe(b: Builder, x: Value, module: MoE) -> Value:
    """A router, the experts over the tokens sorted by expert (transformers' grouped_mm), and what serves every token."""
    t, settings = b.tape, b.settings
    h, k = dim("h", module.hidden_size), dim("K", module.num_experts_per_tok)
    with t.part("router"):
        scores = _router(b, x, module)
    with t.part("experts"):
        y = _liger_experts(b, x, scores, module) if settings.liger else experts(b, x, scores, module, k, h)
    if module.shared:
        with t.part("shared_expert"):
            shared = mlp(b, x, module.shared)
            if module.shared_gate:
                gate_weight = Weight("gate", h, settings.trains, settings.bytes)
                gate = ops.unary(t, ops.linear(t, x, gate_weight, ONE, "gate"), "gate", "result")
                shared = ops.mul(t, shared, gate, "gated")
        y = ops.add(t, y, shared, "sum")
    return y


def _router(b: Builder, x: Value, module: MoE) -> Value:
    """The chosen experts' weights for each token (K numbers)."""
    t = b.tape
    router = ROUTERS[b.model_class.router]
    experts = dim("E", module.num_experts)
    found = tuple(w for w in module.router if w.matmul)
    source = ops.cast(t, x, FULL, "input") if router.wide else x
    weight = b.weight(*found)
    logits = ops.linear(t, source, Weight("router", weight.dim, weight.trains, source.bytes), experts, "logits")
    over = {"E": experts, "K": dim("K", module.num_experts_per_tok), "1": ONE}
    narrowed = logits.bytes if router.sigmoid else FULL
    sizes = [size if letter == "1" or size != FULL else narrowed for _, size, letter in router.rows]
    kept = [t.new(row[0], over[row[2]], x.extent, size) for row, size in zip(router.rows, sizes, strict=True)]
    scores = t.new("scores", over["K"], x.extent, FULL if router.wide_scores else logits.bytes)
    ops.kernel(t, [logits], scores, kept if logits.grad else [])
    return scores


def _liger_experts(b: Builder, x: Value, scores: Value, module: MoE) -> Value:
    """Liger-Kernel's fused experts, where it has patches for them."""
    expert, copies = module.expert, module.num_experts
    if b.settings.liger and not b.settings.liger.experts:
        return experts(b, x, scores, module, dim("K", module.num_experts_per_tok), dim("h", module.hidden_size))
    up = b.weight(*(w for w in expert.weights if w.matmul and w.name in ("gate", "up")), copies=copies)
    down = b.weight(*(w for w in expert.weights if w.matmul and w.name == "down"), copies=copies)
    chosen, every = dim("K", module.num_experts_per_tok), dim("E", module.num_experts)
    return liger.experts(b.tape, x, scores, (up, down), (chosen, every, dim(expert.letter, expert.intermediate_size)))


def experts(b: Builder, x: Value, scores: Value, module: MoE, k: Dim, h: Dim) -> Value:
    """The function holds what it gathered and what the experts gave until it returns, and the biases of each slot meanwhile."""
    t, settings, expert = b.tape, b.settings, module.expert
    copies = -(-module.num_experts // settings.ep)
    f = b.local(dim(expert.letter, expert.intermediate_size))
    up_weights = tuple(w for w in expert.weights if w.matmul and w.name in ("gate", "up"))
    down_weights = tuple(w for w in expert.weights if w.matmul and w.name == "down")
    biased = any(not weight.matmul for weight in expert.weights)
    order = [t.new(name, k, x.extent, LONG) for name in ("token_of_slot", "slot_order", "slot_place")]
    if settings.trains and biased:
        order.append(t.new("expert_of_slot", k, x.extent, LONG))  # which bias each slot takes
    routed = t.new("gathered", k * h, x.extent, x.bytes)
    ops.kernel(t, [x], routed, [order[0], *order[3:]] if x.grad else [])
    sorted_scores = t.new("sorted_scores", k, x.extent, scores.bytes)
    ops.kernel(t, [scores], sorted_scores, [order[1]] if scores.grad else [])
    offsets = t.new("offsets", dim("E", module.num_experts), FIXED, 4)
    width = dim("2", 2) * f if expert.gated else f
    biases = [t.new("up_bias_of_slot", k * width, x.extent, settings.bytes)] if biased else []
    both = _grouped(b, routed, b.weight(*up_weights, copies=copies), k * width, "gate_up", offsets)
    if expert.gated and ROUTERS[b.model_class.router].clamped:
        inner = _clamped(b, both, k * f)
    elif expert.gated:
        gate, up = ops.split(t, both, [k * f, k * f])
        inner = ops.mul(t, activate(b, gate, expert.activation), up, "product")
        del gate, up
    else:
        inner = activate(b, both, expert.activation)
    del both
    biases = [t.new("down_bias_of_slot", k * h, x.extent, settings.bytes)] if biased else []
    out = _grouped(b, inner, b.weight(*down_weights, copies=copies), k * h, "down", offsets)
    del inner
    weighted = ops.mul(t, out, sorted_scores, "weighted")
    placed = t.new("placed", k * h, x.extent, weighted.bytes)
    ops.kernel(t, [weighted], placed, [order[2]] if weighted.grad else [])
    del weighted
    summed = t.new("summed", h, x.extent, placed.bytes)
    meta = (placed.dim, placed.extent, placed.bytes)
    t.record([placed], summed, [], lambda g: (t.new("gradient", *meta),))  # spread out, then copied
    del biases
    return ops.cast(t, summed, x.bytes, "output")


def _clamped(b: Builder, both: Value, width: Dim) -> Value:
    """clamp(gate) * sigmoid(alpha * clamp(gate)) * (clamp(up) + 1), operator by operator."""
    t = b.tape
    gate, up = ops.slices(t, both, [width, width])
    gate = ops.unary(t, gate, "clamped_gate")
    up = ops.unary(t, up, "clamped_up")
    glu = ops.mul(t, gate, ops.unary(t, ops.scale(t, gate), "sigmoid", "result"), "gated")
    return ops.mul(t, ops.scale(t, up, "up_plus_one"), glu, "product")


def _grouped(b: Builder, x: Value, weight: Weight, out_dim: Dim, name: str, offsets: Value) -> Value:
    """torch's grouped matmul over all experts: it saves its input and where each expert's tokens end."""
    t = b.tape
    out = t.new(name, out_dim, x.extent, x.bytes)
    meta = (x.dim, x.extent, x.bytes)
    wants_x = x.grad

    def backward(g: Value, *saved: Value) -> tuple[Value | None]:
        to_x = t.new("gradient", *meta) if wants_x else None
        if weight.trains:
            ops.weight_gradient(t, weight)
        return (to_x,)

    t.record([x, Edge() if weight.trains else None], out, [*([x] if weight.trains else []), offsets], backward)
    return out
