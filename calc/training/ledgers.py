"""Layers whose kept tensors are given by a ledger: Megatron-LM with Transformer Engine (`fused`) and arXiv 2205.05198 (`paper`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from calc.model.feed_forward import MLP, FeedForward
from calc.model.mixers import Attention, CompressedAttention, LatentAttention, Mixer
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Dim, dim
from calc.training.blocks import Block
from calc.training.tape import FIXED, PAIRS, TOKENS, Extent, Storage
from calc.units import ceil_div


class Row(NamedTuple):
    """One kept tensor: its place, bytes an element and features a token. `split`: tensor parallelism divides the features;
    the rest lies between its blocks, where sequence parallelism divides the sequence. `pairs`: one for each two tokens."""

    path: tuple[str, ...]
    bytes: int
    dim: Dim
    split: bool = False
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """What a ledger's block depends on beside the layer."""

    implementation: str
    tp: int
    sharded_sequence: bool
    recompute: str
    loss: str
    gradient: int  # bytes of a weight's gradient as backward makes it; 0 where it is added to the main gradient at once


def _local(size: Dim, tp: int) -> Dim:
    if tp == 1:
        return size
    return Dim(ceil_div(size.size, tp), rf"\lceil \frac{{{size.latex}}}{{<t>}} \rceil", (*size.numbers, ("t", tp)))


def _attention(mixer: Attention, tp: int) -> Iterator[Row]:
    a, d, d_v = dim("a", mixer.num_attention_heads), dim("d", mixer.head_dim), dim("d_v", mixer.v_head_dim)
    d_v = d if d_v.size == d.size else d_v
    heads = mixer.num_key_value_heads
    k = dim("k", heads)
    if tp > heads:  # every rank holds one key and value head
        k = Dim(tp, r"\max(<k>, <t>)", (*k.numbers, ("t", tp)))
    yield Row(("attention", "query"), 2, a * d, True)
    yield Row(("attention", "key"), 2, k * d, True)
    yield Row(("attention", "value"), 2, k * d_v, True)
    yield Row(("attention", "output_input"), 2, a * d_v, True)


def _latent(mixer: LatentAttention) -> Iterator[Row]:
    a, d_v = dim("a", mixer.num_attention_heads), dim("d_v", mixer.v_head_dim)
    d = dim("d_n", mixer.qk_nope_head_dim) + dim("d_r", mixer.qk_rope_head_dim)
    for name, rank in (("query_latent", mixer.q_lora_rank), ("key_value_latent", mixer.kv_lora_rank)):
        if rank:
            letter = dim("r_q" if name == "query_latent" else "r_kv", rank)
            yield Row(("attention", name), 2, letter)
            yield Row(("attention", f"{name}_norm"), 2, letter)
    yield Row(("attention", "query"), 2, a * d, True)
    yield Row(("attention", "key"), 2, a * d, True)
    yield Row(("attention", "value"), 2, a * d_v, True)
    yield Row(("attention", "output_input"), 2, a * d_v, True)


def _compressed(mixer: CompressedAttention) -> Iterator[Row]:
    a, d = dim("a", mixer.num_attention_heads), dim("d", mixer.head_dim)
    yield Row(("attention", "query_latent"), 2, dim("r_q", mixer.q_lora_rank))
    yield Row(("attention", "query_latent_norm"), 2, dim("r_q", mixer.q_lora_rank))
    yield Row(("attention", "query"), 2, a * d, True)
    yield Row(("attention", "key_value"), 2, d)
    yield Row(("attention", "output_input"), 2, a * d, True)
    yield Row(("attention", "output_latent"), 2, dim("g", mixer.o_groups) * dim("r_o", mixer.o_lora_rank))


def _mixer(mixer: Mixer, tp: int) -> Iterator[Row]:
    if isinstance(mixer, Attention):
        return _attention(mixer, tp)
    if isinstance(mixer, LatentAttention):
        return _latent(mixer)
    if isinstance(mixer, CompressedAttention):
        return _compressed(mixer)
    return iter([Row((mixer.kind, "saved"), 2, mixer.saved, True)])


def _mlp(module: MLP, place: str, tokens: Dim | None = None) -> Iterator[Row]:
    """What the fused activation keeps: its input (gate and up together) and the input of the last projection."""
    f = dim(module.letter, module.intermediate_size)
    width = tokens * f if tokens else f
    yield Row((place, "gate_up" if module.gated else "up"), 4 if module.gated else 2, width, True)
    yield Row((place, "product" if module.gated else "activated"), 2, width, True)


def _feed(module: FeedForward) -> Iterator[Row]:
    if isinstance(module, MLP):
        yield from _mlp(module, "mlp")
        return
    chosen, h = dim("K", module.num_experts_per_tok), dim("h", module.hidden_size)
    yield Row(("experts", "gathered"), 2, chosen * h, True)
    yield from _mlp(module.expert, "experts", chosen)
    yield Row(("experts", "weighted"), 2, chosen * h, True)
    if module.shared:
        yield from _mlp(module.shared, "shared_expert")


def fused_rows(layer: Layer, h: Dim, tp: int) -> list[Row]:
    """s b (8h + (4ad + 4kd + 6f) / t): each norm keeps its input and its output, which the projections read.

    The first norm's input is the layer's own and is not among the rows.
    """
    rows: list[Row] = []
    for index, (part, name) in enumerate(((layer.mixer, "mixer"), (layer.feed_forward, "feed_forward"))):
        if part is None:
            continue
        if index and layer.mixer and not layer.parallel:
            rows.append(Row(("norms", f"{name}_norm_input"), 2, h))
        if not (index and layer.mixer and layer.parallel):
            rows.append(Row(("norms", f"{name}_norm_output"), 2, h))
        rows += _mixer(part, tp) if index == 0 else _feed(part)  # type: ignore[arg-type]
    return rows


def paper_rows(h: Dim, heads: int, selective: bool) -> list[Row]:
    """s b h (34 + 5 a s / h), of which 24 and the scores are divided by t: a GPT layer with dropout, computed unfused.

    The first norm's input, 2 s b h of it, is the layer's own and is not among the rows.
    """
    a = dim("a", heads)
    scores = [
        Row(("attention", "softmax"), 2, a, True, True),
        Row(("attention", "softmax_dropout_mask"), 1, a, True, True),
        Row(("attention", "softmax_dropped"), 2, a, True, True),
    ]
    return [
        Row(("attention", "query_key_value_input"), 2, h),
        Row(("attention", "query"), 2, h, True),
        Row(("attention", "key"), 2, h, True),
        *([] if selective else scores),
        Row(("attention", "value"), 2, h, True),
        Row(("attention", "output_input"), 2, h, True),
        Row(("attention", "dropout_mask"), 1, h),
        Row(("norms", "second_norm_input"), 2, h),
        Row(("mlp", "first_input"), 2, h),
        Row(("mlp", "gelu_input"), 2, dim("4", 4) * h, True),
        Row(("mlp", "second_input"), 2, dim("4", 4) * h, True),
        Row(("mlp", "dropout_mask"), 1, h),
    ]


def _storage(row: Row, number: int, layout: Layout) -> Storage:
    between = Extent(1, 1, layout.tp) if layout.sharded_sequence else TOKENS
    extent = PAIRS if row.pairs else TOKENS if row.split else between
    width = _local(row.dim, layout.tp) if row.split else row.dim
    return Storage(row.path, width, extent, row.bytes, number)


@lru_cache(maxsize=4096)
def ledger_layer(layer: Layer, path: tuple[str, ...], h: Dim, heads: int, elements: int, layout: Layout) -> Block:
    """One layer as a block. Backward makes the gradients of its widest step beside what is kept, and those of the weights."""
    selective = layout.recompute == "selective"
    rows = fused_rows(layer, h, layout.tp) if layout.implementation == "fused" else paper_rows(h, heads, selective)
    full = layout.recompute == "full"
    whole_input = full and layout.implementation == "paper"
    return _block(path, ("norms", "first_norm_input"), h, rows, elements, layout, full, whole_input)


def _block(
    path: tuple[str, ...],
    first: tuple[str, ...],
    h: Dim,
    rows: list[Row],
    elements: int,
    layout: Layout,
    full: bool,
    whole_input: bool,
) -> Block:
    between = TOKENS if whole_input else Extent(1, 1, layout.tp) if layout.sharded_sequence else TOKENS
    storages = [Storage(first, h, between, 2, 0)]
    storages += [_storage(row, number, layout) for number, row in enumerate(rows, 1)]
    kept = range(len(storages))
    output = len(storages)
    for name in ("output", "output_gradient", "input_gradient"):
        storages.append(Storage((name,), h, between, 2, len(storages)))
    widest = max(
        (s for s in storages[1:output]),
        key=lambda s: s.dim.size * s.bytes * (1 + (s.extent == PAIRS)),
        default=storages[0],
    )
    working = len(storages)
    storages.append(Storage(("gradients",), widest.dim, widest.extent, widest.bytes, working))
    weights: tuple[int, ...] = ()
    if layout.gradient:
        weights = (len(storages),)
        size = Dim(elements, "<elements>", (("elements", elements),))
        storages.append(Storage(("weight_gradients",), size, FIXED, layout.gradient, weights[0], weight=True))
    made = tuple(kept[1:])
    forward = (*made, output)
    backward = (
        *(made if full else ()),
        working,
        *weights,
        *(~n for n in made),
        ~working,
        output + 2,
        ~(output + 1),
        ~0,
    )
    if full:
        forward = (*made, *(~n for n in made), output)
    return Block(
        path, tuple(storages), forward, backward, (0,) if full else tuple(kept), output, output + 1, output + 2
    )


@lru_cache(maxsize=512)
def ledger_end(spec: ModelSpec, h: Dim, elements: int, layout: Layout) -> Block:
    """Final norm, head and loss: the norm's input and output, and the logits in fp32 (arXiv 2205.05198, section 4.3)."""
    logits = Row(("loss", "logits"), 4, dim("V", spec.vocab_size), True)
    rows = [Row(("head", "input"), 2, h), *([logits] if spec.has_head and layout.loss == "full" else [])]
    return _block(("end",), ("final_norm", "input"), h, rows, elements, layout, False, False)


@lru_cache(maxsize=512)
def ledger_embedding(h: Dim, elements: int, layout: Layout) -> Block:
    """The embedding; the paper counts the mask of its dropout."""
    between = Extent(1, 1, layout.tp) if layout.sharded_sequence else TOKENS
    names = (("tokens",), ("output",), ("output_gradient",), ("embedding", "dropout_mask"))
    storages = [Storage(name, h, between, 2, number) for number, name in enumerate(names)]
    storages[0] = Storage(("tokens",), dim("0", 0), TOKENS, 8, 0)
    storages[3].bytes = 1
    weights: tuple[int, ...] = ()
    if layout.gradient:
        weights = (4,)
        size = Dim(elements, "<elements>", (("elements", elements),))
        storages.append(Storage(("weight_gradients",), size, FIXED, layout.gradient, 4, weight=True))
    paper = layout.implementation == "paper"
    kept = (3,) if paper else ()
    return Block(("embedding",), tuple(storages), (*kept, 1, ~0), (*weights, ~2, *(~n for n in kept)), kept, 1, 2, -1)
