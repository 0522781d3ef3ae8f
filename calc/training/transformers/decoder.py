"""The transformers program of a decoder: its layers, and what stands at both ends."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from calc.model.feed_forward import FeedForward, MoE
from calc.model.mixers import Attention, CompressedAttention, LatentAttention, Mixer, Recurrence
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Dim, Norm, dim
from calc.training.autograd import liger_operators as liger
from calc.training.autograd import operators as ops
from calc.training.autograd.blocks import OUTSIDE, Block, recomputed, record
from calc.training.autograd.builder import Builder, Settings
from calc.training.autograd.operators import FULL, LONG, ONE
from calc.training.autograd.tape import FIXED, POSITIONS, TOKENS, Edge, Node, Value, Weight
from calc.training.states.tensors import linear_modules
from calc.training.transformers import litgpt, torchtune
from calc.training.transformers.attention import attention, compressed, latent
from calc.training.transformers.feed_forward import mlp, moe
from calc.training.transformers.gemma4 import feed as gemma4_feed
from calc.training.transformers.log_probabilities import Scored, log_probabilities
from calc.training.transformers.own_attention import ATTENTIONS


def _norm(layer: Layer, *names: str) -> Norm | None:
    return next((norm for norm in layer.norms if norm.name in names), None)


def _places(layer: Layer) -> tuple[Norm | None, Norm | None, Norm | None, Norm | None]:
    """The norms before and after the mixer and before and after the feed-forward, told apart by their names."""
    names = {norm.name for norm in layer.norms}
    if "mlp_norm" in names:  # side by side, each half with its own
        return _norm(layer, "attention_norm"), None, _norm(layer, "mlp_norm"), None
    sandwich = "pre_feedforward_norm" in names
    first = _norm(layer, "input_norm", "norm", "input_layernorm")
    attention_norm = _norm(layer, "post_attention_norm")
    after = attention_norm if sandwich or (first is None and layer.mixer is not None) else None
    before = _norm(layer, "pre_feedforward_norm") if sandwich else attention_norm if after is None else None
    if before is None and after is None and layer.mixer is None:
        first, before = None, first
    return first, after, before, _norm(layer, "post_feedforward_norm")


def _mix(b: Builder, x: Value, mixer: Mixer, tables: Value) -> Value:
    place = mixer.kind if isinstance(mixer, Recurrence) else "attention"
    with b.tape.part(place):
        x = b.gather(x)
        if isinstance(mixer, Attention) and b.settings.litgpt:
            return litgpt.attention(b, x, mixer, tables)
        if isinstance(mixer, Attention) and b.settings.torchtune:
            return torchtune.attention(b, x, mixer, tables)
        if isinstance(mixer, Attention):
            return b.scatter(ATTENTIONS.get(b.model_class.modeling, attention)(b, x, mixer, tables))
        if isinstance(mixer, LatentAttention):
            return b.scatter(latent(b, x, mixer, tables))
        if isinstance(mixer, CompressedAttention):
            return b.scatter(compressed(b, x, mixer, tables))
        return b.scatter(_recurrent(b, x, mixer))


def _recurrent(b: Builder, x: Value, mixer: Recurrence) -> Value:
    """A recurrence as one operator that keeps its input and what its kernel is known to keep."""
    t = b.tape
    inner = t.new("saved", mixer.saved, x.extent, x.bytes)
    out = t.like(x, "mixed")
    weights = b.weight(*mixer.weights)

    def backward(g: Value, *saved: Value) -> tuple[Value | None]:
        if weights.trains:
            ops.weight_gradient(t, weights)
        return (t.like(g),)

    t.record([x, Edge() if weights.trains else None], out, [x, inner], backward)
    return out


def _feed(b: Builder, x: Value, module: FeedForward) -> Value:
    if isinstance(module, MoE):
        return b.scatter(moe(b, b.gather(x), module))
    with b.tape.part("mlp"):
        return b.scatter(mlp(b, b.gather(x), module))


def _program(b: Builder, layer: Layer, x: Value, tables: Value) -> Value:
    t = b.tape
    first, after, before, last = _places(layer)
    residual_dropout = b.settings.probability("residual")

    def branch(value: Value, norm: Norm | None) -> Value:
        if norm is None:
            return value
        with t.part("norms"):
            return b.norm(value, norm)

    def mixed(value: Value) -> Value:
        made = branch(_mix(b, branch(value, first), layer.mixer, tables), after)  # type: ignore[arg-type]
        return ops.dropout(t, made, residual_dropout, "mixer_output")

    def fed(value: Value) -> Value:
        if b.model_class.modeling == "gemma4":
            return gemma4_feed(b, value, layer)
        made = branch(_feed(b, branch(value, before), layer.feed_forward), last)  # type: ignore[arg-type]
        return ops.dropout(t, made, residual_dropout, "feed_forward_output")

    if layer.parallel and layer.mixer and layer.feed_forward:
        shared = branch(x, first)
        left = ops.dropout(t, _mix(b, shared, layer.mixer, tables), residual_dropout, "mixer_output")
        right = ops.dropout(
            t,
            _feed(b, branch(x, before) if before else shared, layer.feed_forward),
            residual_dropout,
            "feed_forward_output",
        )
        del shared
        return ops.add(t, ops.add(t, left, right), x, "output")
    if layer.mixer:
        x = ops.add(t, x, mixed(x), "residual")
    if layer.feed_forward:
        x = ops.add(t, x, fed(x), "output")
    if b.model_class.scaled_layers:
        return ops.scale_in_place(t, x)
    return ops.view_of(t, x)


@lru_cache(maxsize=4096)
def layer_block(
    layer: Layer, path: tuple[str, ...], settings: Settings, recompute: bool, trains: bool, residual: int
) -> Block:
    """One layer. `trains`: a gradient flows to its input; `residual` are the bytes of the numbers between the layers."""
    modules = tuple(module for _, module in linear_modules(layer.parts))
    width = dim("h", _hidden(layer))
    program = torchtune.compiled_layer if settings.compiled else _program

    def run(saving: bool) -> Block:
        builder = Builder(settings, layer, modules, saving)
        tables = builder.tape.new("tables", dim("d", 1), POSITIONS, residual)
        builder.tape.storages.clear()
        tables.storage.number = OUTSIDE
        return record(
            builder,
            path,
            lambda inputs: program(builder, layer, inputs[0], tables),
            width,
            settings.between,
            residual,
            trains,
        )

    return recomputed(run(False), run(True)) if recompute else run(True)


def _hidden(layer: Layer) -> int:
    part = layer.mixer or layer.feed_forward
    if isinstance(part, Recurrence):
        return next((norm.size.size for norm in layer.norms), 1)
    return part.hidden_size if part else next((norm.size.size for norm in layer.norms), 1)


@lru_cache(maxsize=512)
def end_block(
    spec: ModelSpec,
    settings: Settings,
    loss: str,
    several: bool,
    residual: int,
    trains: bool,
    chunk: tuple[int, int] = (1, 1),
    scored: Scored | None = None,
) -> Block:
    """Final norm, head and loss. `several` sequences in a batch: their shifted labels are a copy of the padded ones.

    `chunk`: tokens in a chunk of the fused loss, and chunks in all. `scored`: log-probabilities instead of a loss over all tokens.
    """
    b = Builder(settings)
    t = b.tape
    vocabulary = b.local(dim("V", spec.vocab_size))
    head = spec.head or spec.embeddings[:1]

    def program(inputs: list[Value]) -> Value:
        x = inputs.pop()
        embedded = t.like(x, "embedded") if scored and scored.embedded else None
        if spec.final_norm:
            with t.part("final_norm"):
                x = b.norm(x, spec.final_norm)
        if not spec.has_head:
            return ops.view_of(t, x)
        x = b.gather(x)
        weight = b.weight(*(w for w in head if w.matmul or spec.tied))
        head_weight = Weight("weight", weight.dim, settings.trains_head, settings.bytes)
        if scored:
            del embedded
            with t.part("scores"):
                return log_probabilities(t, x, head_weight, vocabulary, scored)
        if settings.litgpt:
            return litgpt.head_and_loss(b, x, head_weight, vocabulary)
        if loss == "chunked-output":
            return torchtune.head_and_loss(b, x, head_weight, vocabulary)
        if loss != "full":
            with t.part("loss"):
                if loss == "fused":
                    return liger.fused_linear_cross_entropy(t, x, head_weight, vocabulary, chunk, several)
                return _chunked(b, x, head_weight, vocabulary)
        with t.part("head"):
            logits = ops.linear(t, x, head_weight, vocabulary, "logits")
            if spec.logit_softcap:
                logits = ops.scale(t, ops.unary(t, ops.scale(t, logits), "capped", "result"), "logits")
            if spec.head_scale:
                logits = ops.scale(t, logits, "logits")
        with t.part("loss"):
            if settings.torchtune:
                return torchtune.whole_loss(b, logits)
            if settings.liger:
                return liger.cross_entropy(t, logits, several)
            if settings.loss_format == "upcast":
                logits = ops.cast(t, logits, FULL, "fp32_logits")
                shifted = ops.copy(t, logits, "shifted_logits") if several else logits
                del logits
                return _loss(b, shifted, several, FULL)
            return _loss(b, logits, several, settings.bytes if settings.loss_format == "model" else FULL)

    return record(b, (), program, dim("h", spec.hidden_size), settings.between, residual, trains)


def _loss(b: Builder, logits: Value, several: bool, size: int = FULL) -> Value:
    """transformers' loss: the logits in fp32, or as they are, their log-softmax, the mean over the labels."""
    t = b.tape
    wide = ops.cast(t, logits, size, "fp32_logits")
    padded = t.new("padded_labels", ONE, logits.extent, LONG) if several else None
    labels = t.new("labels", ONE, logits.extent, LONG)
    log = ops.softmax(t, wide, "log_probabilities", size)
    out = t.new("loss", ONE, FIXED, FULL)
    weight = t.new("total_weight", ONE, FIXED, FULL)
    ops.kernel(t, [log], out, [log, labels, weight])
    del padded
    return out


CHUNKS = 8  # of the sequence, in which `chunked` runs the head


def _chunk(b: Builder, x: Value, vocabulary: Dim) -> None:
    """The logits of one chunk, in fp32, and their gradient, made and freed."""
    t = b.tape
    part = Dim(
        -(-vocabulary.size // CHUNKS), rf"\lceil \frac{{{vocabulary.latex}}}{{{CHUNKS}}} \rceil", vocabulary.numbers
    )
    made = [
        t.new(name, part, x.extent, size)
        for name, size in (("logits", x.bytes), ("fp32_logits", FULL), ("gradient", FULL))
    ]
    made.clear()


def _chunked(b: Builder, x: Value, weight: Weight, vocabulary: Dim) -> Value:
    """The head and the loss chunk by chunk, each made again in backward: only the head's input is kept."""
    t = b.tape
    out = t.new("loss", ONE, FIXED, FULL)
    _chunk(b, x, vocabulary)

    def backward(g: Value, kept: Value) -> tuple[Value]:
        made = t.like(kept)
        if weight.trains:
            ops.weight_gradient(t, weight)
        _chunk(b, kept, vocabulary)
        return (made,)

    t.record([x], out, [x], backward)
    return out


@lru_cache(maxsize=512)
def embedding_block(spec: ModelSpec, settings: Settings, leaf: bool = False) -> Block:
    """The token table, the position table where there is one, and their dropout. `leaf`: what the table gives asks for a
    gradient, as peft has it where adapters meet recomputation; it is held like a parameter."""
    b = Builder(settings)
    t = b.tape
    h = dim("h", spec.hidden_size)

    def program(inputs: list[Value]) -> Value:
        tokens = inputs.pop()
        tokens.storage.number = OUTSIDE  # the caller's
        with t.part("embedding"):
            out = _token(b, spec, tokens, h, leaf)
            for table in spec.embeddings[1:]:
                if table.name == "position":
                    extent = TOKENS if b.model_class.batched_positions else POSITIONS
                    positions = t.new("positions", ONE, extent, LONG)
                    looked = t.new(table.name, h, extent, settings.bytes)
                    _lookup(b, b.weight(table), positions, looked, False)
                    out = ops.add(t, out, looked, "sum")
            if any(table.name == "norm" for table in spec.embeddings):
                out = b.norm(out, Norm("norm", h, "layer", "native", bias=True))
            if spec.embedding_scale:
                out = ops.scale(t, out, "scaled")
            return ops.dropout(t, out, settings.probability("embedding"), "dropped")

    return record(b, (), program, ONE, settings.between, LONG, False)


def _token(b: Builder, spec: ModelSpec, tokens: Value, h: Dim, leaf: bool) -> Value:
    t, table = b.tape, spec.embeddings[0]
    looked = t.new(table.name, h, b.settings.between, b.settings.bytes)
    _lookup(b, replace(b.weight(table), trains=b.settings.trains_embedding), tokens, looked, spec.tied)
    if leaf:
        looked.edge = Edge()
        t.nodes.append(Node((None,), (looked.edge,), [t.view(looked)], lambda g, *saved: (None,)))
    return looked


def _lookup(b: Builder, table: Weight, ids: Value, out: Value, tied: bool) -> None:
    """Join an embedding to the graph. Where the head is tied, its gradient waits, and both are summed into a third."""
    t = b.tape
    if not table.trains:
        return

    def summed(g: Value) -> tuple[None]:
        ops.weight_gradient(t, table)
        return (None,)

    def backward(g: Value, *saved: Value) -> tuple[Value | None]:
        if tied:
            return (t.new("table_gradient", table.dim, FIXED, table.bytes),)
        ops.weight_gradient(t, table)
        return (None,)

    edge = Edge()
    if tied:
        t.nodes.append(Node((None,), (edge,), [], summed))
    t.record([edge], out, [ids], backward)
