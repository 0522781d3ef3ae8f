"""Liger-Kernel's operators on a tape: what each keeps for backward, and what it writes over instead of making it anew.

From the autograd functions of Liger-Kernel 0.8.5 (liger_kernel/ops) and the patches that it gives a transformers model.
"""

from __future__ import annotations

from calc.model.weights import Dim, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.operators import BOOL, FULL, HALF, LONG, ONE
from calc.training.autograd.tape import FIXED, Edge, Tape, Value, Weight
from calc.units import ceil_div

VERSION = "Liger-Kernel 0.8.5"
URL = "https://github.com/linkedin/Liger-Kernel/tree/v0.8.5/src/liger_kernel/ops"
PROCESSORS = 132  # multiprocessors of an H100: a norm's backward sums the weight's gradient on each (an A100 has 108)


def norm(t: Tape, x: Value, weight: Weight, rows: Dim, in_place: bool) -> Value:
    """RMS norm: keeps its input and one fp32 number a row; the output has the input's format."""
    out = t.like(x, "output")
    kept, inverse = _alone(t, x, "input"), t.new("inverse_root", rows, x.extent, FULL)
    wants_x = x.grad

    def backward(g: Value, *saved: Value) -> tuple[Value | None]:
        sums = t.new("partial_sums", dim("P", PROCESSORS) * weight.dim, FIXED, FULL) if weight.trains else None
        to_x = (g if in_place else t.like(g)) if wants_x else None
        if sums is not None:
            ops.weight_gradient(t, weight, FULL)
        return (to_x,)

    t.record([x, Edge() if weight.trains else None], out, [kept, inverse], backward)
    return out


def _alone(t: Tape, x: Value, name: str) -> Value:
    """x itself, or a copy where it is a part of a larger tensor."""
    return x if x.storage.dim.size == x.dim.size else t.new(name, x.dim, x.extent, x.bytes)


def _over(t: Tape, x: Value) -> Value:
    """What is written over x."""
    return Value(t, x.storage, x.dim, None)


def rotary(t: Tape, query: Value, key: Value) -> list[Value]:
    """Rotary positions, turned in place in forward and backward: nothing is kept but the model's tables."""
    made = [_over(t, _alone(t, x, name)) for x, name in ((query, "query"), (key, "key"))]
    t.record([query, key], made, [], lambda *g: g)
    return made


def gated(t: Tape, gate: Value, up: Value) -> Value:
    """act(gate) * up, SiLU and GELU alike: keeps both, and writes their gradients over them."""
    inputs = [gate, up]
    kept = [_alone(t, x, name) for x, name in ((gate, "gate"), (up, "up"))]
    out = t.like(gate, "product")
    t.record(inputs, out, kept, lambda g, *saved: [_over(t, x) for x in saved])
    return out


def experts(t: Tape, x: Value, scores: Value, weights: tuple[Weight, Weight], sizes: tuple[Dim, Dim, Dim]) -> Value:
    """Routed experts in one function: keeps its input, gate and up before the activation, and where each slot's token lies.

    `weights`: gate and up together, down. `sizes`: experts of a token, experts in all, their width. Of the tiles one an expert is
    counted: 8 bytes for each 64 tokens beyond the first are left out.
    """
    (up, down), (k, every, f) = weights, sizes
    both, h = dim("2", 2) * f, x.dim
    chosen = t.new("chosen", k, x.extent, 4)
    order = [t.new(name, k, x.extent, 4) for name in ("token_of_slot", "slot_of_score", "score_of_slot")]
    starts = [
        t.new("starts", every + dim("1", 1), FIXED, 4),
        *(t.new(name, every, FIXED, 4) for name in ("tile_rows", "tile_experts")),
    ]
    before = t.new("gate_up", k * both, x.extent, x.bytes)
    after = [t.new("product", k * f, x.extent, x.bytes), t.new("down", k * h, x.extent, x.bytes)]
    out = t.like(x, "output")
    after.clear()
    del chosen
    meta, wants = (scores.dim, scores.extent), (x.grad, scores.grad)

    def backward(g: Value, *saved: Value) -> tuple[Value | None, Value | None]:
        to_both = t.new("gradient", k * both, g.extent, g.bytes)
        weighted = t.new("product", k * f, g.extent, g.bytes)
        to_scores = t.new("gradient", *meta, g.bytes)
        made = [t.new("down_gradient", down.dim, FIXED, down.bytes)] if down.trains else []
        spread = t.new("gradient", k * h, g.extent, g.bytes)
        to_x = t.like(g)
        made += [t.new("gate_up_gradient", up.dim, FIXED, up.bytes)] if up.trains else []
        for value in made:
            t.keep_gradient(value)
        del to_both, weighted, spread
        return to_x if wants[0] else None, to_scores if wants[1] else None

    inputs = [x, scores, Edge() if up.trains else None]
    t.record(inputs, out, [x, before, scores, *order, *starts], backward)
    return out


def chunk_tokens(tokens: int, hidden_size: int, vocabulary: int) -> int:
    """Tokens whose logits are made at a time, so that they take about as much memory as the head's whole input."""
    share = ceil_div(tokens, ceil_div(vocabulary, hidden_size))
    return min(1 << (share - 1).bit_length(), tokens)


def _labels(t: Tape, x: Value, several: bool) -> list[Value]:
    """The padded labels, and where there are several sequences a copy of what follows the first; which of them count."""
    made = [t.new("padded_labels", ONE, x.extent, LONG)]
    if several:
        made.append(t.new("labels", ONE, x.extent, LONG))
    return made


def fused_linear_cross_entropy(
    t: Tape, x: Value, weight: Weight, vocabulary: Dim, chunk: tuple[int, int], several: bool
) -> Value:
    """The head and the loss together: forward makes the gradients of the input and of the head, a chunk of tokens at a time.

    `chunk`: tokens in a chunk, and chunks in all. No logits are kept; those of a chunk become their gradient in place.
    """
    rows = dim("C", chunk[0])
    size = ops.matmul_bytes(t, x)
    labels = _labels(t, x, several)
    to_x = t.like(x, "input_gradient")
    to_weight = [t.new("weight_gradient", weight.dim, FIXED, weight.bytes)] if weight.trains else []
    buffers = [*labels, t.new("losses", ONE, x.extent, FULL), t.new("counted", ONE, x.extent, BOOL)]
    if t.autocast:
        for _ in range(min(2, chunk[1])):  # every chunk after the second is like the second
            _autocast_chunk(t, x, weight, rows, vocabulary)
    else:
        logits = t.new("logits", rows * vocabulary, FIXED, size)
        if weight.trains and size == FULL:
            t.new("product", weight.dim, FIXED, FULL)  # 16-bit gradients are added up in place
        del logits
    out = t.new("loss", ONE, FIXED, FULL)
    buffers.clear()
    labels.clear()

    def backward(g: Value, made: Value, *of_weight: Value) -> tuple[Value, Value | None]:
        for value in of_weight:
            t.keep_gradient(_over(t, value))
        return _over(t, made), None

    t.record([x, Edge() if weight.trains else None], out, [to_x, *to_weight], backward)
    return out


def _autocast_chunk(t: Tape, x: Value, weight: Weight, rows: Dim, vocabulary: Dim) -> None:
    """One chunk in 16 bits from fp32 tensors: autocast remembers its copy of a head that trains, but none of a transposed one."""
    part = rows * x.dim
    inputs, head = t.new("chunk_copy", part, FIXED, HALF), t.new("transposed_head_copy", weight.dim, FIXED, HALF)
    logits = t.new("logits", rows * vocabulary, FIXED, HALF)
    del inputs, head
    if weight not in t.casts:
        t.casts[weight] = t.new("head_copy", weight.dim, FIXED, HALF)
    product = t.new("chunk_gradient", part, FIXED, HALF)
    if not weight.trains:
        t.casts.clear()
    del product
    if weight.trains:
        again = t.new("chunk_copy", part, FIXED, HALF)
        del again
    del logits


def cross_entropy(t: Tape, logits: Value, several: bool) -> Value:
    """The loss of whole logits, which transformers casts to fp32: their gradient is written over them."""
    wide = ops.cast(t, logits, FULL, "fp32_logits")
    labels = _labels(t, wide, several)
    losses, mask = t.new("losses", ONE, wide.extent, FULL), t.new("counted", ONE, wide.extent, BOOL)
    checked = [t.new("labels_in_range", ONE, wide.extent, LONG), t.new("largest_label", ONE, FIXED, LONG)]
    del checked
    out = t.new("loss", ONE, FIXED, FULL)
    del losses, mask
    labels.clear()
    t.record([wide], out, [wide], lambda g, made: [_over(t, made)])
    return out
