"""The end of torchtitan's step: the final norm and head, and the cross-entropy outside the model by its programs."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from calc.model.spec import ModelSpec
from calc.model.weights import Dim, dim
from calc.training.autograd import operators as ops
from calc.training.autograd.blocks import Block, record
from calc.training.autograd.builder import Builder, Settings
from calc.training.autograd.operators import BOOL, FULL, LONG, ONE
from calc.training.autograd.tape import FIXED, TOKENS, Value
from calc.training.torchtitan.layers import TitanBuilder
from calc.units import ceil_div

CHUNKS: Final = 8  # num_chunks of torchtitan's ChunkedLossWrapper, num_output_chunks of the loss before it


@lru_cache(maxsize=512)
def end_block(spec: ModelSpec, settings: Settings, *, head: bool = True) -> Block:
    """Final norm and head; without the head where the loss runs it chunk by chunk."""
    b = TitanBuilder(settings)
    vocabulary = b.local(dim("V", spec.vocab_size))
    norm = spec.final_norm
    assert norm is not None

    def program(held: list[Value]) -> Value:
        x = held.pop()
        with b.tape.part("final_norm"):
            x = b.rms(x, norm)
        with b.tape.part("head"):
            x = b.gather(x)
            return b.matmul(x, spec.head, spec.head[0].name, vocabulary) if head else x

    return record(b, ("end",), program, dim("h", spec.hidden_size), settings.between, settings.bytes, True)


@lru_cache(maxsize=512)
def loss_block(vocabulary: int, settings: Settings, *, compiled: bool = False, chunked: bool = False) -> Block:
    """Cross-entropy of the logits in fp32, outside the model; the logits live until it has ended. `chunked`: of chunks of the logits."""
    b = Builder(settings)
    width = b.local(dim("V", vocabulary))

    def program(held: list[Value]) -> Value:
        if compiled:  # one kernel over the 16-bit logits; the chunks' gradients are written into one tensor
            return _compiled_loss(b, held[0])
        if chunked:
            return _chunked_output_loss(b, held[0])
        wide = ops.cast(b.tape, held[0], FULL, "fp32_logits")
        return (_divided_loss if settings.tp > 1 else _loss)(b, wide)

    return record(b, ("loss",), program, width, TOKENS, settings.bytes, True)


@lru_cache(maxsize=512)
def chunked_loss_block(spec: ModelSpec, settings: Settings, *, compiled: bool = False) -> Block:
    """Head and loss of a chunk of the tokens after the other, forward and backward at once (ChunkedLossWrapper): all that is left for
    backward is the gradient of the hidden states. The head's gradient gathers in fp32 until the last chunk."""
    b = TitanBuilder(settings)
    t, width = b.tape, _part(b.local(dim("V", spec.vocab_size)))
    weight = b.weight(*spec.head)

    def chunk() -> None:
        logits = t.new("logits", width)
        sums = [t.new(name, ONE, FIXED, FULL) for name in ("loss", "total_weight")]
        if not compiled:
            wide = t.new("fp32_logits", width, TOKENS, FULL)
            log = t.new("log_probabilities", width, TOKENS, FULL)
            del wide
            chosen = t.new("gradient", width, TOKENS, FULL)
            made = t.new("gradient", width, TOKENS, FULL)
            del log, chosen
        gradient = t.new("gradient", width)
        if not compiled:
            del made
        to_hidden = t.new("gradient", _part(dim("h", spec.hidden_size)))
        to_head = t.new("head_gradient", weight.dim, FIXED)
        del logits, sums, gradient, to_hidden, to_head

    def program(held: list[Value]) -> Value:
        x = held.pop()
        chunks = t.like(x, "chunks")
        sums = t.like(x, "gradient_sums", FULL)
        chunk()
        total = t.new("head_gradient_sum", weight.dim, FIXED, FULL)
        chunk()
        reduced = t.new("reduce_scatter", weight.dim, FIXED, FULL)
        del total, reduced, chunks
        gradient = t.like(x, "hidden_gradient")
        del sums
        out = t.new("loss_sum", ONE, FIXED, FULL)
        t.record([x], out, [gradient], lambda g, *saved: saved)
        return out

    return record(b, ("loss",), program, dim("h", spec.hidden_size), TOKENS, settings.bytes, True)


def _part(whole: Dim) -> Dim:
    """The share of one chunk."""
    latex = rf"\lceil \frac{{{whole.latex}}}{{{CHUNKS}}} \rceil"
    return Dim(ceil_div(whole.size, CHUNKS), latex, whole.numbers)


def _loss(b: Builder, wide: Value) -> Value:
    t = b.tape
    log = ops.softmax(t, wide, "log_probabilities", FULL)
    out = t.new("loss_sum", ONE, FIXED, FULL)
    total = t.new("total_weight", ONE, FIXED, FULL)
    ops.kernel(t, [log], out, [log, total])
    return out


def _compiled_loss(b: Builder, logits: Value) -> Value:
    """Cross-entropy as Inductor's kernels: the largest of each row and the logarithm of its sum are kept next to the logits."""
    t = b.tape
    kept = [t.new(name, ONE, TOKENS, FULL) for name in ("largest", "logarithm")]
    out = t.new("loss_sum", ONE, FIXED, FULL)
    total = t.new("total_weight", ONE, FIXED, FULL)
    ops.kernel(t, [logits], out, [logits, *kept, total])
    return out


def _chunked_output_loss(b: Builder, logits: Value) -> Value:
    """The loss of a chunk of the logits after the other; backward joins the chunks' gradients."""
    t = b.tape
    parts = ops.split(t, logits, [_part(logits.dim)] * CHUNKS)
    total = _loss(b, ops.cast(t, parts.pop(0), FULL, "fp32_logits"))
    while parts:
        total = ops.add(t, total, _loss(b, ops.cast(t, parts.pop(0), FULL, "fp32_logits")), "loss_sum")
    return total


def _divided_loss(b: Builder, wide: Value) -> Value:
    """Each rank's part of the vocabulary (torch/distributed/tensor/parallel/loss.py): backward makes the gradient of the
    logits at once, from the probabilities and a -1 for each label that lies on this rank."""
    t = b.tape

    def token(name: str, size: int) -> Value:
        return t.new(name, ONE, TOKENS, size)

    largest = token("largest", FULL)
    shifted = t.like(wide, "shifted")
    powers = t.like(wide, "powers")
    sums = token("sums", FULL)
    del powers
    logarithms = token("logarithms", FULL)
    log = t.like(wide, "log_probabilities")
    del shifted, largest, sums, logarithms
    t.record([wide], log, [log], lambda g, *saved: (g,))
    out = t.new("loss_sum", ONE, FIXED, FULL)
    total = t.new("total_weight", ONE, FIXED, FULL)
    meta = (log.dim, log.extent)

    def backward(g: Value, *saved: Value) -> tuple[Value]:
        places = [token("labels", LONG)]
        ones = t.new("ones", *meta, FULL)
        places += [token("own_labels", LONG), token("elsewhere", BOOL), token("updates", FULL), token("rows", LONG)]
        places.append(token("loss_gradients", FULL))
        powers = t.new("probabilities", *meta, FULL)
        both = t.new("sum", *meta, FULL)
        del powers
        made = t.new("gradient", *meta, FULL)
        del ones, both, places
        return (made,)

    t.record([log], out, [log, total], backward)
    return out
