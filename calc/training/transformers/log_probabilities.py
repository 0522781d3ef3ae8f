"""TRL's head that gives log-probabilities and no logits, on a tape: preference and reinforcement learning end with it.

From TRL 1.16 (trl/kernels/chunked_logprob.py, add_fused_lm_head): tiles of 4096 tokens by 32768 words, made again in backward.
"""

from __future__ import annotations

from typing import NamedTuple

from calc.model.weights import Dim, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.operators import BOOL, FULL, HALF, LONG, ONE
from calc.training.autograd.tape import FIXED, Edge, Tape, Value, Weight

TILE_TOKENS, TILE_WORDS = 4096, 32768
_STATISTICS = ("largest", "sum", "weighted_sum", "sum_of_squares", "sum_of_logits", "largest_before", "of_target")


class Scored(NamedTuple):
    """What the head scores: `tokens` of the completions, among the `positions` that have a next token; its `outputs` a position.

    `embedded`: the model's forward holds what its embedding gave, which no layer keeps, until the final norm has run.
    """

    tokens: int
    positions: int
    outputs: tuple[str, ...]
    embedded: bool


def log_probabilities(t: Tape, x: Value, weight: Weight, vocabulary: Dim, scored: Scored) -> Value:
    """The loss of the completions' log-probabilities: keeps the hidden states that are scored, copied, and a few numbers each."""
    tokens, positions = dim("N", scored.tokens), dim("M", scored.positions)
    mask = t.new("scored", positions, FIXED, BOOL)
    hidden = t.new("scored_hidden", tokens * x.dim, FIXED, x.bytes)
    meta, wide = (x.dim, x.extent, x.bytes), (positions * x.dim, FIXED, x.bytes)
    before = Value(t, x.storage, x.dim, None)
    t.record([x], before, [], lambda g: (t.new("gradient", *meta),))  # all but the last position
    t.record([before], hidden, [mask], lambda g, *saved: (t.new("gradient", *wide),))
    del before
    targets = t.new("targets", tokens, FIXED, LONG)
    statistics = [t.new(name, tokens, FIXED, FULL) for name in _STATISTICS]
    _tiles(t, hidden, weight, vocabulary, scored.tokens)
    kept = [t.new("log_sum", tokens, FIXED, FULL)]
    if "entropy" in scored.outputs:
        kept.append(t.new("entropy", tokens, FIXED, FULL))
    statistics.clear()
    outputs = [t.new(name, positions, FIXED, FULL) for name in scored.outputs]
    out = t.new("loss", ONE, FIXED, FULL)
    outputs.clear()
    wants = hidden.grad

    def backward(g: Value, *saved: Value) -> tuple[Value | None, Value | None]:
        to_hidden = t.new("gradient", tokens * meta[0], FIXED, FULL) if wants else None
        to_weight = t.new("weight_gradient_fp32", weight.dim, FIXED, FULL) if weight.trains else None
        buffer = _tiles(t, saved[0], weight, vocabulary, scored.tokens)
        cast = ops.cast(t, to_hidden, meta[2], "gradient") if to_hidden is not None else None
        if to_weight is not None:
            made = to_weight if weight.bytes == FULL else t.new("weight_gradient", weight.dim, FIXED, weight.bytes)
            t.keep_gradient(made)
        del buffer
        return cast, None

    inputs = [hidden, Edge() if weight.trains else None]
    t.record(inputs, out, [hidden, targets, *kept], backward)
    return out


def _tiles(t: Tape, hidden: Value, weight: Weight, vocabulary: Dim, scored: int) -> Value:
    """The buffer of all tiles, and under autocast the 16-bit copies of what one tile multiplies."""
    tokens, words = dim("n", min(scored, TILE_TOKENS)), dim("v", TILE_WORDS)
    buffer = t.new("tile", tokens * words, FIXED, ops.matmul_bytes(t, hidden))
    if t.autocast and weight.bytes != HALF:
        width = weight.dim.size // vocabulary.size
        h = dim("h", width)
        copies = [t.new("tokens_copy", tokens * h, FIXED, HALF), t.new("words_copy", words * h, FIXED, HALF)]
        copies.clear()
    return buffer
