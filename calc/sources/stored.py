"""What a checkpoint stores, tensor by tensor, as its header says: which group each tensor belongs to, and in what role."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isqrt
from typing import Final, NamedTuple

from calc.breakdown import Breakdown, Component, Formula

MOST_TENSORS: Final = 2**20  # the largest checkpoint in use stores under 300,000
MOST_ELEMENTS: Final = 2**62


class HeaderLimit(NamedTuple):
    """What one header may take: its bytes, and seconds of a processor to understand it."""

    bytes: int
    seconds: float


FROM_ELSEWHERE: Final = HeaderLimit(16_000_000, 5.0)  # what anyone may have put on the Hub


class StoredTensor(NamedTuple):
    """One tensor of a file: its name there, its format, how many elements of that format, and their bytes."""

    name: str
    dtype: str
    elements: int
    bytes: int


# a tensor's group, by what its name holds; the first that fits
_GROUPS = tuple(
    (group, re.compile(pattern))
    for group, pattern in (
        ("towers", r"(^|\.)(visual|vision\w*|audio\w*|image_newline|multi_modal_projector|mm_projector|mm|v)\."),
        ("norms", r"norm|(^|\.)ln_|layernorm|(^|\.)ln\d"),
        (
            "embedding",
            r"embed_tokens|embed_in\.|(^|\.)wte\.|(^|\.)wpe\.|word_embeddings|tok_embeddings|token_embd|position_embd"
            r"|position_embeddings|embed_positions|token_type|(^|\.)shared\.|(^|\.)embeddings?\.",
        ),
        ("head", r"(^|\.)lm_head|(^|\.)embed_out\.|^output\.|^cls\.|^score\.|^classifier\."),
        ("experts", r"expert|_exps|_shexp|block_sparse_moe|gate_inp|router|mlp\.gate\.|exp_probs"),
        ("attention", r"attn|attention|[qkvo]_proj|query_key_value"),
        ("mlp", r"mlp|ffn|feed_forward|\.fc\d?\.|\.fc_|gate_proj|up_proj|down_proj|dense_"),
    )
)
GROUPS = ("embedding", "attention", "mlp", "experts", "norms", "head", "towers", "other")
# what a tensor is besides a weight: its name's end says so
_SCALE = re.compile(
    r"(weight_scale\w*|input_scale\w*|scale_inv|_global_scale|[qkv]_scale|\bscales|_scales|qzeros|g_idx|zero_point|absmax"
    r"|quant_map|SCB|weight_format|weight_shape|bitsandbytes__\w+)$"
)
_BUFFER = re.compile(
    r"(inv_freq|position_ids|masked_bias|rope_freqs\.weight|rope_factors_(long|short)\.weight|e_score_correction_bias"
    r"|exp_probs_b\.bias|num_batches_tracked|running_mean|running_var)$"
)
_MASK = re.compile(r"(^|\.)(attn|attention)\.bias$")  # GPT-2's and GPT-NeoX's causal mask, a square of their context
_PACKED = re.compile(r"(qweight|weight_packed|_blocks)$")
_QUANTIZED = re.compile(r"\.weight$")
_CONTAINERS = ("U8", "I32", "U32", "I16")
_NUMBER = re.compile(r"[0-9]+")
_ZEROS = str.maketrans("123456789", "000000000")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blk|blocks|block|h)\.(\d{1,6})\.")


def group_of(name: str) -> str:
    """The group of a tensor by its name: one of `GROUPS`."""
    return _group(name.translate(_ZEROS))


@lru_cache(maxsize=4096)
def _group(pattern: str) -> str:
    """The same by a name whose digits are 0: a checkpoint of 100,000 tensors has a few dozen of these."""
    pattern = _NUMBER.sub("0", pattern)
    return next((group for group, regex in _GROUPS if regex.search(pattern)), "other")


def role_of(tensor: StoredTensor) -> str:
    """One of "weight", "scale" of a quantised one, "buffer" (not a parameter of the model's class), or "packed": a container of several."""
    role = _role(tensor.name.translate(_ZEROS), tensor.dtype)
    if role == "mask":
        return "buffer" if isqrt(tensor.elements) ** 2 == tensor.elements else "weight"
    return role


@lru_cache(maxsize=4096)
def _role(pattern: str, dtype: str) -> str:
    pattern = _NUMBER.sub("0", pattern)
    if dtype == "F8_E8M0" or _SCALE.search(pattern):
        return "scale"
    if _BUFFER.search(pattern):
        return "buffer"
    if _MASK.search(pattern):
        return "mask"
    if _PACKED.search(pattern) or (dtype in _CONTAINERS and _QUANTIZED.search(pattern)):
        return "packed"
    return "weight"


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to, by its name."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


class Sum(NamedTuple):
    """Elements and bytes of some tensors."""

    elements: int
    bytes: int


class Cell(NamedTuple):
    """What tensors of one sum have in common."""

    group: str
    role: str
    dtype: str

    @property
    def name(self) -> str:
        """The name of its leaf: its format, with the role where that is not a weight's."""
        return self.dtype if self.role == "weight" else f"{self.role}_{self.dtype}"


@dataclass(frozen=True)
class StoredTensors:
    """All tensors of one checkpoint. `blocks`: for each format, the bytes of a block and the elements in it."""

    where: str
    tensors: tuple[StoredTensor, ...]
    blocks: Mapping[str, tuple[int, int]]
    formula_source: str
    formula_url: str
    notes: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return sum(cell.elements for cell in self.cells.values())

    @property
    def bytes(self) -> int:
        return sum(cell.bytes for cell in self.cells.values())

    def by_dtype(self) -> dict[str, Sum]:
        """Elements and bytes of each format, the largest first."""
        return dict(sorted(self._sums(lambda cell: cell.dtype).items(), key=lambda item: -item[1].bytes))

    def by_group(self) -> dict[str, Sum]:
        """Elements and bytes of each group, in the order of `GROUPS`."""
        sums = self._sums(lambda cell: cell.group)
        return {group: sums[group] for group in GROUPS if group in sums}

    def by_role(self) -> dict[str, Sum]:
        """Elements and bytes of each role."""
        return self._sums(lambda cell: cell.role)

    def _sums(self, key: Callable[[Cell], str]) -> dict[str, Sum]:
        sums: dict[str, Sum] = {}
        for cell, part in self.cells.items():
            elements, size = sums.get(key(cell), (0, 0))
            sums[key(cell)] = Sum(elements + part.elements, size + part.bytes)
        return sums

    @cached_property
    def cells(self) -> Mapping[Cell, Sum]:
        """Elements and bytes of each group, role and format: what all sums are made of, from one pass over the tensors."""
        kinds = Counter((name.translate(_ZEROS), dtype, elements, size) for name, dtype, elements, size in self.tensors)
        cells: dict[Cell, Sum] = {}
        for (pattern, dtype, elements, size), count in kinds.items():
            cell = Cell(group_of(pattern), role_of(StoredTensor(pattern, dtype, elements, size)), dtype)
            before = cells.get(cell, Sum(0, 0))
            cells[cell] = Sum(before.elements + count * elements, before.bytes + count * size)
        return cells

    def breakdown(self, unit: str = "bytes") -> Breakdown:
        """The tensors by group and format, in "bytes", or in elements as "parameters"."""
        return Breakdown(Component("stored", children=tuple(self._nodes(unit))), unit)

    def _nodes(self, unit: str) -> Iterator[Component]:
        for group in GROUPS:
            leaves = tuple(
                self._leaf(cell.name, cell.dtype, total, unit)
                for cell, total in self.cells.items()
                if cell.group == group
            )
            if leaves:
                yield Component(group, children=leaves)

    def _leaf(self, name: str, dtype: str, total: Sum, unit: str) -> Component:
        size, count = self.blocks[dtype]
        if unit == "bytes":
            latex = r"\frac{<n> \cdot <B>}{<n_{block}>}"
            numbers = {"n": total.elements, "B": size, "n_{block}": count}
            value = total.bytes
        else:
            latex, numbers, value = "<n>", {"n": total.elements}, total.elements
        return Component(name, value, formula=Formula(latex, self.formula_source, self.formula_url), numbers=numbers)
