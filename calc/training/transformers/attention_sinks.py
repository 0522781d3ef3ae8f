"""Attention weights with a learned sink: gpt-oss's and MiMo's softmax over shifted scores, operator by operator."""

from __future__ import annotations

from calc.model.weights import Dim
from calc.training.autograd import operators as ops
from calc.training.autograd.builder import Builder
from calc.training.autograd.operators import LONG
from calc.training.autograd.tape import PAIRS, TOKENS, Edge, Extent, Tape, Value, Weight


def shifted_softmax(b: Builder, scores: list[Value], named: list[Value], a: Dim, has_sinks: bool) -> Value:
    """Softmax in the scores' format over the scores less their largest, and over one learned sink a head where there are any,
    whose column is dropped after.

    `scores` is what Python calls the scores: the raw ones before, in some classes the shifted ones after. `named` are the
    tensors that have a name of their own until the function returns: what gets one here is put there.
    """
    t = b.tape
    joined = _next_to_sinks(b, scores[0], a) if has_sinks else scores[0]
    reused = b.model_class.shifted_scores
    if reused:
        scores.clear()
    largest = _largest(t, joined, a)
    shifted = ops.subtract(t, joined, largest, "shifted")
    del joined, largest
    (scores if reused else named).append(shifted)
    weights = ops.softmax(t, shifted, "weights", shifted.bytes)
    named.append(t.view(weights))
    return _part(t, weights, PAIRS) if has_sinks else weights


def _next_to_sinks(b: Builder, scores: Value, a: Dim) -> Value:
    """The scores with one more column, the sinks."""
    t = b.tape
    sinks = Weight("sinks", a, b.settings.trains, b.settings.bytes)
    narrow = scores.extent
    out = t.new("scores_and_sinks", a, narrow._replace(more=1), scores.bytes)

    def backward(g: Value) -> tuple[Value]:
        if sinks.trains:
            ops.weight_gradient(t, sinks)
        return (_seen(t, g, narrow),)

    t.record([scores, Edge() if sinks.trains else None], out, [], backward)
    return out


def _largest(t: Tape, scores: Value, a: Dim) -> Value:
    """The largest score of each row, whose place is kept: its gradient is put into zeros of the whole."""
    rows = t.new("largest", a, TOKENS, scores.bytes)
    places = t.new("places", a, TOKENS, LONG)
    meta = (scores.dim, scores.extent, scores.bytes)

    def backward(g: Value, *saved: Value) -> tuple[Value]:
        zeros = t.new("gradient", *meta)
        placed = t.like(zeros)
        del zeros
        return (placed,)

    t.record([scores], rows, [places], backward)
    return rows


def _part(t: Tape, x: Value, extent: Extent) -> Value:
    """The columns of x without the last, whose gradient is padded to the whole."""
    out = _seen(t, x, extent)
    meta = (x.dim, x.extent, x.bytes)
    t.record([x], out, [], lambda g: (t.new("gradient", *meta),))
    return out


def _seen(t: Tape, x: Value, extent: Extent) -> Value:
    """A view of some columns of x."""
    view = Value(t, x.storage, x.dim, None)
    view.extent = extent
    return view
