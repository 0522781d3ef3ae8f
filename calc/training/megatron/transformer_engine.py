"""Megatron-LM with Transformer Engine (`fused`): what each module keeps, and how backward goes through it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from calc.model.feed_forward import MLP, FeedForward
from calc.model.mixers import Attention, CompressedAttention, LatentAttention, Mixer
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Dim, dim
from calc.training.autograd.blocks import Block
from calc.training.autograd.tape import FIXED, TOKENS, Extent, Storage
from calc.training.megatron.paper import Layout, Row, row_storage, weight_gradients

Step = tuple[Row, ...]  # what one operator reads, whose gradients it makes together


def _attention(mixer: Attention, tp: int) -> Iterator[Step]:
    a, d, d_v = dim("a", mixer.num_attention_heads), dim("d", mixer.head_dim), dim("d_v", mixer.v_head_dim)
    d_v = d if d_v.size == d.size else d_v
    heads = mixer.num_key_value_heads
    k = dim("k", heads)
    if tp > heads:  # every rank holds one key and value head
        k = Dim(tp, r"\max(<k>, <t>)", (*k.numbers, ("t", tp)))
    yield (
        Row(("attention", "query"), 2, a * d, True),
        Row(("attention", "key"), 2, k * d, True),
        Row(("attention", "value"), 2, k * d_v, True),
    )
    yield (Row(("attention", "output_input"), 2, a * d_v, True),)


def _latent(mixer: LatentAttention) -> Iterator[Step]:
    a, d_v = dim("a", mixer.num_attention_heads), dim("d_v", mixer.v_head_dim)
    d = dim("d_n", mixer.qk_nope_head_dim) + dim("d_r", mixer.qk_rope_head_dim)
    ranks = (("query_latent", "r_q", mixer.q_lora_rank), ("key_value_latent", "r_kv", mixer.kv_lora_rank))
    latents = [(name, dim(letter, rank)) for name, letter, rank in ranks if rank]
    yield tuple(Row(("attention", name), 2, rank) for name, rank in latents)
    yield tuple(Row(("attention", f"{name}_norm"), 2, rank, enters=True) for name, rank in latents)
    yield (
        Row(("attention", "query"), 2, a * d, True),
        Row(("attention", "key"), 2, a * d, True),
        Row(("attention", "value"), 2, a * d_v, True),
    )
    yield (Row(("attention", "output_input"), 2, a * d_v, True),)


def _compressed(mixer: CompressedAttention) -> Iterator[Step]:
    a, d, rank = dim("a", mixer.num_attention_heads), dim("d", mixer.head_dim), dim("r_q", mixer.q_lora_rank)
    yield (Row(("attention", "query_latent"), 2, rank),)
    yield (Row(("attention", "query_latent_norm"), 2, rank, enters=True),)
    yield Row(("attention", "query"), 2, a * d, True), Row(("attention", "key_value"), 2, d)
    yield (Row(("attention", "output_input"), 2, a * d, True),)
    yield (Row(("attention", "output_latent"), 2, dim("g", mixer.o_groups) * dim("r_o", mixer.o_lora_rank)),)


def _mixer(mixer: Mixer, tp: int) -> Iterator[Step]:
    if isinstance(mixer, Attention):
        return _attention(mixer, tp)
    if isinstance(mixer, LatentAttention):
        return _latent(mixer)
    if isinstance(mixer, CompressedAttention):
        return _compressed(mixer)
    return iter([(Row((mixer.kind, "saved"), 2, mixer.saved, True),)])


def _mlp(module: MLP, place: str, tokens: Dim | None = None) -> Iterator[Step]:
    """What the fused activation keeps: its input (gate and up together) and the input of the last projection."""
    f = dim(module.letter, module.intermediate_size)
    width = tokens * f if tokens else f
    yield (Row((place, "gate_up" if module.gated else "up"), 4 if module.gated else 2, width, True),)
    yield (Row((place, "product" if module.gated else "activated"), 2, width, True),)


def _feed(module: FeedForward) -> Iterator[Step]:
    if isinstance(module, MLP):
        yield from _mlp(module, "mlp")
        return
    chosen, h = dim("K", module.num_experts_per_tok), dim("h", module.hidden_size)
    yield (Row(("experts", "gathered"), 2, chosen * h, True),)
    yield from _mlp(module.expert, "experts", chosen)
    yield (Row(("experts", "weighted"), 2, chosen * h, True),)
    if module.shared:
        yield from _mlp(module.shared, "shared_expert")


def _enters(part: Mixer | FeedForward) -> bool:
    """Whether column-parallel layers read the norm's output: not MLA's down-projections, nor a router."""
    return isinstance(part, Attention | MLP) or getattr(part, "shared", None) is not None


def fused_steps(layer: Layer, h: Dim, tp: int, dropped: bool) -> list[Step]:
    """s b (8h + (4ad + 4kd + 6f) / t): each norm keeps its input and its output, which the projections read; with dropout
    each residual its mask.

    The first norm's input is the layer's own and is not among the rows.
    """
    steps: list[Step] = []
    for index, (part, name) in enumerate(((layer.mixer, "mixer"), (layer.feed_forward, "feed_forward"))):
        if part is None:
            continue
        if index and layer.mixer and not layer.parallel:
            steps.append((Row(("norms", f"{name}_norm_input"), 2, h),))
        if not (index and layer.mixer and layer.parallel):
            steps.append((Row(("norms", f"{name}_norm_output"), 2, h, enters=_enters(part)),))
        steps += _mixer(part, tp) if index == 0 else _feed(part)  # type: ignore[arg-type]
        if dropped:
            steps.append((Row((name, "dropout_mask"), 1, h),))
    return steps


def _module_of(row: Row, modules: tuple[str, ...], kind: str) -> str:
    """The module whose backward makes this row again, one of `modules`; "" for a row that is kept (megatron/core/transformer:
    transformer_config.py, recompute_modules). layernorm, moe_act and mla_up_proj drop their outputs (CheckpointWithoutOutput), the others
    all but their input. Flash attention keeps nothing but its operands and its output, whatever core_attn says."""
    place, name = row.path[0], row.path[-1]
    found = {
        "layernorm": place == "norms" and name.endswith("_norm_output"),
        "mla_up_proj": kind == "latent" and (name in ("query", "key", "value") or name.endswith("_latent_norm")),
        "mlp": place == "mlp",
        "moe": place in ("experts", "shared_expert"),
        "moe_act": place == "experts" and name in ("product", "activated"),
        "shared_experts": place == "shared_expert",
    }
    module = next((module for module in modules if found.get(module)), "")
    return f"{module}/{name}" if module == "layernorm" else module  # each norm is one of its own


class _Script:
    """Storages of a block as they are named, and events on them."""

    def __init__(self, layout: Layout, h: Dim) -> None:
        self.layout, self.h = layout, h
        self.storages: list[Storage] = []

    def add(self, name: tuple[str, ...], size: Dim, extent: Extent, width: int = 2) -> int:
        self.storages.append(Storage(name, size, extent, width, len(self.storages)))
        return len(self.storages) - 1

    def row(self, row: Row) -> int:
        self.storages.append(row_storage(row, len(self.storages), self.layout))
        return len(self.storages) - 1

    def gradient(self, number: int) -> int:
        """A gradient like that storage."""
        like = self.storages[number]
        return self.add((*like.name[:-1], f"{like.name[-1]}_gradient"), like.dim, like.extent, like.bytes)

    def weights(self, name: str, elements: int) -> int:
        """The gradients of weights, which stay."""
        found = weight_gradients((name, "weight_gradients"), elements, self.layout.gradient, len(self.storages), True)
        self.storages.append(found)
        return found.number

    def whole(self, name: tuple[str, ...], size: Dim) -> int:
        """Of the whole sequence, between gather and scatter."""
        return self.add(name, size, TOKENS)


Kept = list[tuple[Step, tuple[int, ...]]]
Again = dict[int, str]  # rows that are not kept, and the module that makes each again


def _forward(script: _Script, kept: Kept, output: int, again: Again) -> list[int]:
    """Each row as it is made. Sequence parallelism gathers what the column-parallel layers read, one layer long. What is made again
    goes when its reader has run."""
    events: list[int] = []
    received: list[int] = []
    waiting: list[int] = []
    for step, numbers in kept:
        events += numbers
        events += [~number for number in received]
        events += [~number for number in waiting]
        waiting = [number for number in numbers if number in again]
        received = []
        if script.layout.sharded_sequence:
            received = [script.whole(("gathered",), row.dim) for row in step if row.enters]
            events += received
    if script.layout.sharded_sequence:  # the row-parallel layer's sum, before it is scattered
        whole = script.whole(("output_sum",), script.h)
        return [*events, *(~number for number in received), whole, output, ~whole, *(~number for number in waiting)]
    return [*events, *(~number for number in received), output, *(~number for number in waiting)]


def _backward(script: _Script, kept: Kept, again: Again, weights: dict[str, int]) -> list[int]:
    """In reverse: an operator makes the gradients of what it read, then what it read and the gradients before go.

    Under sequence parallelism a row-parallel layer gathers its output's gradient, a column-parallel one its input, and makes the
    gradient of the whole sequence before it is scattered. The gradient of the residual lives through all of it.
    """
    layout, events, before = script.layout, list[int](), list[int]()
    inside, waiting = False, dict(again)
    for step, numbers in reversed(kept):
        modules = {waiting[number] for number in numbers if number in waiting}
        events += [number for number, module in waiting.items() if module in modules]  # the module runs forward again
        waiting = {number: module for number, module in waiting.items() if module not in modules}
        around: list[int] = []
        if layout.sharded_sequence and not inside and step[0].split:
            around = [script.whole(("gathered_gradient",), script.h)]
        if layout.sharded_sequence:
            for row in step:
                if row.enters:
                    around += [script.whole(("gathered",), row.dim), script.whole(("gradient_sum",), row.dim)]
        made = [script.gradient(number) for number in numbers if script.storages[number].name[-1] != "dropout_mask"]
        name = step[0].path[-1].removesuffix("_norm_output")
        grown = [script.weights(name, weights[name])] if name in weights else []
        events += [*around, *made, *grown, *(~number for number in (*around, *before, *numbers))]
        before, inside = made, step[0].split
    return [*events, *(~number for number in before)]


@lru_cache(maxsize=4096)
def fused_layer(
    layer: Layer, path: tuple[str, ...], h: Dim, mixer_elements: int, feed_forward_elements: int, layout: Layout
) -> Block:
    """One layer as a block. `..._elements`: the weights whose gradients backward makes, where it keeps them."""
    script = _Script(layout, h)
    first: Step = (Row(("norms", "first_norm_input"), 2, h),)
    kept: Kept = [(first, (script.row(first[0]),))]
    for step in fused_steps(layer, h, layout.tp, "residual" in layout.dropped):
        kept.append((step, tuple(script.row(row) for row in step)))
    kind = "latent" if isinstance(layer.mixer, LatentAttention) else ""
    rows = [(row, number) for step, numbers in kept[1:] for row, number in zip(step, numbers, strict=True)]
    again = {number: module for row, number in rows if (module := _module_of(row, layout.modules, kind))}
    saved = tuple(number for _, numbers in kept for number in numbers if number not in again)
    output, output_gradient, input_gradient = (
        script.add((name,), h, layout.between) for name in ("output", "output_gradient", "input_gradient")
    )
    weights = {"mixer": mixer_elements, "feed_forward": feed_forward_elements} if layout.gradient else {}
    forward = _forward(script, kept[1:], output, again)
    backward = [*_backward(script, kept[1:], again, weights), input_gradient, ~output_gradient, ~0]
    if layout.recompute == "full":
        once = [event for event in forward if event != output]
        freed = [~number for number in saved[1:]]
        backward = [*once, *backward]
        forward = [*once, *freed, output]
        saved = (0,)
    return Block(
        path, tuple(script.storages), tuple(forward), tuple(backward), saved, output, output_gradient, input_gradient
    )


@lru_cache(maxsize=512)
def fused_end(spec: ModelSpec, h: Dim, elements: int, head: int, layout: Layout) -> Block:
    """Final norm, head and loss, which hold `elements` weights, `head` of them in the head.

    The head's logits are 16-bit. Megatron's loss makes them fp32 and turns that copy into the gradient, which is cast back; Transformer
    Engine's (loss "fused") writes the gradient over the logits. The head's weight gradient is a tensor of its own even where it was
    added to the main gradient (LinearWithGradAccumulationAndAsyncCommunication), and is freed then.
    """
    script = _Script(layout, h)
    norm_input = script.row(Row(("final_norm", "input"), 2, h))
    head_input = script.row(Row(("head", "input"), 2, h, enters=True))
    loss, loss_gradient = (script.add((name,), dim("1", 1), FIXED, 4) for name in ("loss", "loss_gradient"))
    input_gradient = script.add(("input_gradient",), h, layout.between)
    whole = [script.whole(("head", "gathered_input"), h)] if layout.sharded_sequence else []
    forward, backward, kept = [head_input], [~loss_gradient], [norm_input, head_input]
    if spec.has_head and layout.loss != "chunked":
        vocabulary = dim("V", spec.vocab_size)
        logits = script.row(Row(("loss", "logits_16_bit"), 2, vocabulary, True))
        forward += [*whole, logits]
        gradient = logits
        if layout.loss == "full":
            wide = script.row(Row(("loss", "logits"), 4, vocabulary, True))
            gradient = script.gradient(logits)
            forward += [wide, ~logits]
            backward += [gradient, ~wide]
            kept.append(wide)
        else:
            kept.append(logits)
        forward += [~number for number in whole]
        backward += _head_backward(script, whole, gradient, elements, head)
    elif layout.gradient:
        backward.append(script.weights("head", elements))
    forward.append(loss)
    backward += [input_gradient, ~head_input, ~norm_input]
    return Block(
        ("end",), tuple(script.storages), tuple(forward), tuple(backward), tuple(kept), loss, loss_gradient, input_gradient
    )  # fmt: skip


def _head_backward(script: _Script, whole: list[int], logits_gradient: int, elements: int, head: int) -> list[int]:
    layout = script.layout
    norm_gradient = script.add(("head", "input_gradient"), script.h, layout.between)
    summed = [script.whole(("head", "gradient_sum"), script.h)] if layout.sharded_sequence else []
    if layout.gradient:
        weights, freed = script.weights("head", elements), []
    else:
        weights = len(script.storages)
        script.storages.append(weight_gradients(("head", "weight_gradient"), head, 2, weights, False))
        freed = [~weights]
    released = [~number for number in (*summed, *whole, logits_gradient)]
    return [*whole, *summed, norm_gradient, weights, *freed, *released, ~norm_gradient]
