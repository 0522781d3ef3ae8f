"""What Inductor's kernels materialise around matmuls, which programs that compile their layers share (PyTorch 2.13)."""

from __future__ import annotations

from calc.model.weights import Dim
from calc.training.autograd import operators as ops
from calc.training.autograd.tape import TOKENS, Edge, Tape, Value, Weight


def added(t: Tape, x: Value, y: Value) -> Value:
    """x + y in the place of y, whichever of the two backward computes the other from."""
    out = t.view(y)
    t.record([x, y], out, [], lambda g: (g, g))
    return out


def shared(t: Tape, x: Value, uses: int) -> list[Value]:
    """x for so many matmuls: one kernel adds the gradients of all, which wait for it, into the place of one."""
    views = [t.view(x) for _ in range(uses)]
    t.record([x], views, [], lambda *g: (g[0],))
    return views


def gated_down(t: Tape, gate: Value, up: Value, weight: Weight, out_dim: Dim) -> Value:
    """down(silu(gate) * up). Backward makes the product's gradient and in one kernel those of gate and up, and only then the
    weight's, for which the product lives on. The caller's handles of gate and up end with the call."""
    product = t.like(gate, "product")
    source = t.view(product)

    def weights_gradient(g: Value, *saved: Value) -> tuple[None]:
        ops.weight_gradient(t, weight)
        return (None,)

    t.record([Edge()], source, [product], weights_gradient)
    meta = (gate.dim, gate.extent, gate.bytes)
    t.record([gate, up], product, [gate, up], lambda g, *saved: (t.new("gradient", *meta), t.new("gradient", *meta)))
    del gate, up
    out = t.new("down", out_dim, TOKENS, product.bytes)
    t.record([product, source], out, [product], lambda g, *saved: (t.new("gradient", *meta), g))
    return out
