"""What a checkpoint stores, tensor by tensor, as its header says: which group each tensor belongs to, and in what role."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Final, NamedTuple, TypeVar

from calc.breakdown import Breakdown, Component, Formula

Key = TypeVar("Key", bound=Hashable)
MOST_TENSORS: Final = 2**20  # the largest checkpoint in use stores under 300,000
MOST_ELEMENTS: Final = 2**62


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
_NUMBER = re.compile(r"\d+")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blk|blocks|block|h)\.(\d{1,6})\.")


def group_of(name: str) -> str:
    """The group of a tensor by its name: one of `GROUPS`."""
    return _group(_NUMBER.sub("0", name))


@lru_cache(maxsize=4096)
def _group(pattern: str) -> str:
    """The same by a name whose numbers are 0: a checkpoint of 100,000 tensors has a few dozen of these."""
    return next((group for group, regex in _GROUPS if regex.search(pattern)), "other")


def role_of(tensor: StoredTensor) -> str:
    """One of "weight", "scale" of a quantised one, "buffer" (not a parameter of the model's class), or "packed": a container of several."""
    role = _role(_NUMBER.sub("0", tensor.name), tensor.dtype)
    if role == "mask":
        return "buffer" if isqrt(tensor.elements) ** 2 == tensor.elements else "weight"
    return role


@lru_cache(maxsize=4096)
def _role(pattern: str, dtype: str) -> str:
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


@dataclass(frozen=True, slots=True)
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
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    def by_dtype(self) -> dict[str, Sum]:
        """Elements and bytes of each format, the largest first."""
        return dict(sorted(self._sums(lambda tensor: tensor.dtype).items(), key=lambda item: -item[1].bytes))

    def by_group(self) -> dict[str, Sum]:
        """Elements and bytes of each group, in the order of `GROUPS`."""
        sums = self._sums(lambda tensor: group_of(tensor.name))
        return {group: sums[group] for group in GROUPS if group in sums}

    def _sums(self, key: Callable[[StoredTensor], Key]) -> dict[Key, Sum]:
        sums: dict[Key, Sum] = {}
        for tensor in self.tensors:
            name = key(tensor)
            elements, size = sums.get(name, (0, 0))
            sums[name] = Sum(elements + tensor.elements, size + tensor.bytes)
        return sums

    def breakdown(self, unit: str = "bytes") -> Breakdown:
        """The tensors by group and format, in "bytes", or in elements as "parameters"."""
        return Breakdown(Component("stored", children=tuple(self._nodes(unit))), unit)

    def _nodes(self, unit: str) -> Iterator[Component]:
        cells = self._sums(_cell)
        for group in GROUPS:
            leaves = tuple(
                self._leaf(name, dtype, total, unit) for (of, name, dtype), total in cells.items() if of == group
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


def _cell(tensor: StoredTensor) -> tuple[str, str, str]:
    role = role_of(tensor)
    name = tensor.dtype if role == "weight" else f"{role}_{tensor.dtype}"
    return group_of(tensor.name), name, tensor.dtype
