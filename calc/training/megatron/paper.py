"""The ledger of arXiv 2205.05198 (`paper`), and what it shares with Megatron's (`calc.training.megatron.transformer_engine`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from calc.model.spec import ModelSpec
from calc.model.weights import Dim, dim
from calc.training.autograd.blocks import Block
from calc.training.autograd.tape import FIXED, PAIRS, TOKENS, Extent, Storage
from calc.units import ceil_div


class Row(NamedTuple):
    """One kept tensor: its place, bytes an element and features a token. `split`: tensor parallelism divides the features;
    the rest lies between its blocks, where sequence parallelism divides the sequence. `pairs`: one for each two tokens.
    `enters`: column-parallel layers read it, for which sequence parallelism gathers it."""

    path: tuple[str, ...]
    bytes: int
    dim: Dim
    split: bool = False
    pairs: bool = False
    enters: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """What a ledger's block depends on besides the layer."""

    implementation: str
    tp: int
    sharded_sequence: bool
    recompute: str
    loss: str
    gradient: int  # bytes of a weight's gradient as backward makes it; 0 where it is added to the main gradient at once
    modules: tuple[str, ...] = ()  # that backward computes again (recompute_modules)
    dropped: tuple[str, ...] = ()  # where dropout keeps its mask: "residual", "embedding"

    @property
    def between(self) -> Extent:
        """Of what lies between the tensor-parallel blocks."""
        return Extent(1, 1, self.tp) if self.sharded_sequence else TOKENS


def local(size: Dim, tp: int) -> Dim:
    """The features of a divided dimension on one rank."""
    if tp == 1:
        return size
    return Dim(ceil_div(size.size, tp), rf"\lceil \frac{{{size.latex}}}{{<t>}} \rceil", (*size.numbers, ("t", tp)))


def row_storage(row: Row, number: int, layout: Layout) -> Storage:
    """The row as a storage of a block."""
    extent = PAIRS if row.pairs else TOKENS if row.split else layout.between
    return Storage(row.path, local(row.dim, layout.tp) if row.split else row.dim, extent, row.bytes, number)


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


@lru_cache(maxsize=4096)
def paper_layer(path: tuple[str, ...], h: Dim, heads: int, elements: int, layout: Layout) -> Block:
    """One layer as a block. Backward makes the gradients of its widest step besides what is kept, and those of the weights."""
    rows = paper_rows(h, heads, layout.recompute == "selective")
    return _block(path, ("norms", "first_norm_input"), h, rows, elements, layout)


def _block(
    path: tuple[str, ...], first: tuple[str, ...], h: Dim, rows: list[Row], elements: int, layout: Layout
) -> Block:
    full = layout.recompute == "full" and path != ("end",)
    between = TOKENS if full else layout.between
    storages = [Storage(first, h, between, 2, 0)]
    storages += [row_storage(row, number, layout) for number, row in enumerate(rows, 1)]
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
        storages.append(weight_gradients(("weight_gradients",), elements, layout.gradient, weights[0], True))
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


def weight_gradients(name: tuple[str, ...], elements: int, size: int, number: int, stays: bool) -> Storage:
    """The gradients of that many weights, of `size` bytes each; whether they stay until the optimizer's step."""
    found = Dim(elements, "<elements>", (("elements", elements),))
    return Storage(name, found, FIXED, size, number, weight=stays)


@lru_cache(maxsize=512)
def paper_end(spec: ModelSpec, h: Dim, elements: int, layout: Layout) -> Block:
    """Final norm, head and loss: the norm's input and output, and the logits in fp32 (arXiv 2205.05198, section 4.3)."""
    logits = Row(("loss", "logits"), 4, dim("V", spec.vocab_size), True)
    rows = [Row(("head", "input"), 2, h), *([logits] if spec.has_head and layout.loss == "full" else [])]
    return _block(("end",), ("final_norm", "input"), h, rows, elements, layout)


@lru_cache(maxsize=512)
def ledger_embedding(h: Dim, elements: int, layout: Layout) -> Block:
    """The embedding and the mask of its dropout. Backward makes the table's gradient whole, in 16 bits, even where it is
    then added to the main gradient and freed."""
    names = (("tokens",), ("output",), ("output_gradient",), ("embedding", "dropout_mask"))
    storages = [Storage(name, h, layout.between, 2, number) for number, name in enumerate(names)]
    storages[0] = Storage(("tokens",), dim("0", 0), TOKENS, 8, 0)
    storages[3].bytes = 1
    table = weight_gradients(("weight_gradients",), elements, layout.gradient or 2, 4, bool(layout.gradient))
    passing = () if layout.gradient else (~4,)
    storages.append(table)
    kept = (3,) if layout.implementation == "paper" or "embedding" in layout.dropped else ()
    backward = (4, *passing, ~2, *(~n for n in kept))
    return Block(("embedding",), tuple(storages), (*kept, 1, ~0), backward, kept, 1, 2, -1)
