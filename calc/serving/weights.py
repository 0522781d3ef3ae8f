"""The weights as a serving engine holds them: per GPU, in their format, for a stage of the pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil
from typing import NamedTuple

from calc.breakdown import Component, Formula, Number, unique_names
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Part, Split, Weight
from calc.serving.formats import GGML, WEIGHT_FORMATS, Bits, WeightFormat, gguf_format
from calc.serving.gguf import embedding_type, fitting, head_type, layer_types
from calc.units import ceil_div

_Mix = Mapping[str, str]


class Experts(NamedTuple):
    """The routed experts of one layer: bytes of all, how many there are, and how many a token uses."""

    bytes: int
    copies: int
    active: int


@dataclass(frozen=True, eq=False)
class StoredWeights:
    """One layer of each sort, the sort of every layer, and what the first and the last stage hold beside layers.

    `experts` are those of one layer of each sort; `reread` the bytes that one reads of an earlier layer's weights. `head_copy` is
    the token table once more, which a tied model's last stage holds when it is not the first.
    """

    sorts: tuple[Component, ...]
    experts: tuple[Experts, ...]
    reread: tuple[int, ...]
    pattern: tuple[int, ...]
    first: tuple[Component, ...]
    last: tuple[Component, ...]
    head_copy: tuple[Component, ...]
    format: WeightFormat

    def stage(self, layers: range, stages: int) -> tuple[Component, ...]:
        """The parts that the stage with these layers holds."""
        found = list(self.first) if layers.start == 0 else []
        counts = [0] * len(self.sorts)
        for layer in layers:
            counts[self.pattern[layer]] += 1
        present = [
            Component(sort.name, children=sort.children, count=count)
            for sort, count in zip(self.sorts, counts, strict=True)
            if count and sort.children
        ]
        if len(present) == 1:
            found.append(Component("layers", children=present[0].children, count=present[0].count))
        elif present:
            found.append(Component("layers", children=unique_names(present)))
        if layers.stop == len(self.pattern):
            found += [*self.last, *(self.head_copy if stages > 1 else ())]
        return tuple(found)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of one layer of each sort."""
        return tuple(_total(sort.children) for sort in self.sorts)

    @cached_property
    def sort_counts(self) -> tuple[tuple[int, int], ...]:
        """(sort, how many layers of it)."""
        return tuple(Counter(self.pattern).items())

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(self.sizes[sort] * count for sort, count in self.sort_counts)

    @cached_property
    def ends(self) -> tuple[int, int, int]:
        """Bytes of what the first stage, the last stage, and the last of several hold beside layers."""
        return _total(self.first), _total(self.last), _total(self.head_copy)

    @cached_property
    def head_bytes(self) -> int:
        """Bytes that each step reads after the layers: the final norm and the head, which a tied model reads from the token table."""
        return self.ends[1] + self.ends[2]

    def stage_bytes(self, layers: range, stages: int) -> int:
        """Bytes of `stage`, without building it."""
        whole = len(layers) == len(self.pattern)
        total = self.layer_bytes if whole else sum(self.sizes[self.pattern[layer]] for layer in layers)
        first, last, copy = self.ends
        total += first if layers.start == 0 else 0
        if layers.stop == len(self.pattern):
            total += last + (copy if stages > 1 else 0)
        return total


def _total(parts: tuple[Component, ...]) -> int:
    return int(sum(part.total for part in parts))


@lru_cache(maxsize=64)
def stored_weights(spec: ModelSpec, name: str, tp: int) -> StoredWeights:
    """The weights of one tensor-parallel rank in that format; a spec hashes by identity, so a slider move finds them made."""
    ftype = name.removeprefix("gguf-") if name.startswith("gguf-") else ""
    form = gguf_format(name) if ftype else WEIGHT_FORMATS[name]
    has_experts = any(part.expert for parts in spec.layers.kind_parts for part in parts)
    store = _Store(form, tp, form.experts_only and has_experts)
    index: dict[tuple[int, tuple[tuple[str, str], ...]], int] = {}
    pattern: list[int] = []
    sorts: list[Component] = []
    experts: list[Experts] = []
    reread: list[int] = []
    for at, kind_index in enumerate(spec.layers.pattern):
        kind = spec.layers.kinds[kind_index]
        mix = layer_types(ftype, spec, at, kind) if ftype else ()
        key = (kind_index, mix)
        if key not in index:
            index[key] = len(sorts)
            parts = spec.layers.kind_parts[kind_index]
            sorts.append(store.layer(kind, parts, dict(mix)))
            experts.append(_experts(sorts[-1], parts))
            again = tuple(replace(part, copies=part.active) for part in parts if not part.copies)
            reread.append(int(store.layer(kind, again, dict(mix)).total))
        pattern.append(index[key])
    head = {"": head_type(ftype)} if ftype else {}
    table = head if spec.tied else {"": embedding_type(ftype)} if ftype else {}
    embedding = Component("embedding", children=store.leaves(Part("embedding", spec.embeddings), table))
    first = [embedding]
    for tower in spec.towers:
        if tower.in_total:
            first.append(
                store.tower(tower.name, tower.stack.kinds, tower.stack.kind_parts, tower.stack.counts, tower.parts)
            )
    last = (
        [Component("final_norm", children=store.leaves(Part("final_norm", spec.final_norm.weights), {}))]
        if spec.final_norm
        else []
    )
    last.append(Component("head", children=store.leaves(Part("head", spec.head), head)))
    last += [Component(part.name, children=store.leaves(part, head)) for part in spec.other]
    copy = Component("tied_head", children=embedding.children[:1]) if spec.tied and spec.has_head else Component("")
    return StoredWeights(
        tuple(sorts),
        tuple(experts),
        tuple(reread),
        tuple(pattern),
        tuple(part for part in first if part.children),
        tuple(part for part in last if part.children),
        (copy,) if copy.children else (),
        form,
    )


def _experts(layer: Component, parts: tuple[Part, ...]) -> Experts:
    for part in parts:
        if part.expert:
            return Experts(int(layer.child(part.name).total), part.copies, part.active)
    return Experts(0, 1, 1)


@dataclass(frozen=True, slots=True)
class _Store:
    """Writes weights in one format for one tensor-parallel rank."""

    form: WeightFormat
    tp: int
    experts_only: bool

    def layer(self, kind: Layer, parts: tuple[Part, ...], mix: _Mix) -> Component:
        kv = getattr(kind.mixer, "num_key_value_heads", 0)
        held = [part for part in parts if part.copies]
        children = [Component(part.name, children=self.leaves(part, mix, kv), count=part.copies) for part in held]
        return Component(kind.kind, children=unique_names([child for child in children if child.children]))

    def tower(
        self,
        name: str,
        kinds: tuple[Layer, ...],
        kind_parts: tuple[tuple[Part, ...], ...],
        counts: tuple[int, ...],
        parts: tuple[Part, ...],
    ) -> Component:
        """A tower stays wide and whole on every rank, as vision encoders do in most checkpoints."""
        wide = _Store(WEIGHT_FORMATS["bf16"], 1, False)
        layers = [
            Component(kind.kind, children=wide.layer(kind, found, {}).children, count=count)
            for kind, found, count in zip(kinds, kind_parts, counts, strict=True)
        ]
        own = [Component(part.name, children=wide.leaves(part, {}), count=part.copies) for part in parts]
        return Component(name, children=unique_names([part for part in (*own, *layers) if part.children]))

    def leaves(self, part: Part, mix: _Mix, kv: int = 0) -> tuple[Component, ...]:
        return unique_names([self._leaf(weight, self._bits(weight, part, mix), kv) for weight in part.weights])

    def _bits(self, weight: Weight, part: Part, mix: _Mix) -> Bits:
        table = len(weight.shape) == 2 and part.name in ("embedding", "head")
        linear = weight.matmul and part.name not in ("router", "head") and weight.shape[0].size > 1
        if mix:
            if not (linear or (table and weight.name in ("token", "weight"))):
                return self.form.wide
            return GGML[fitting(mix.get(weight.name, mix[""]), weight.shape[-1].size)]
        if not linear or (self.experts_only and not part.expert):
            return self.form.wide
        return self.form.linear

    def _leaf(self, weight: Weight, bits: Bits, kv: int) -> Component:
        numbers: dict[str, Number] = dict(weight.numbers)
        share, latex = weight.parameters, weight.latex
        ways = 1 if weight.split is Split.NONE else min(self.tp, kv or self.tp) if weight.split is Split.KV else self.tp
        if ways > 1:
            share = ceil_div(share, ways)
            numbers["t"] = self.tp
            by_head = weight.split is Split.KV and kv
            if by_head:
                numbers["k"] = kv
            under = r"\min(<t>, <k>)" if by_head else "<t>"
            latex = rf"\lceil \frac{{{latex}}}{{{under}}} \rceil"
        value = bits.value
        if bits.per_row:
            numbers["n_{in}"] = weight.shape[-1].size
            value += Fraction(bits.per_row, weight.shape[-1].size)
        if value.denominator == 1 and value % 8 == 0:
            latex = rf"{latex} \cdot {value // 8}"
        else:
            latex = rf"\lceil \frac{{{latex} \cdot {bits.latex}}}{{8}} \rceil"
            numbers |= bits.numbers
        formula = Formula(latex, self.form.source, self.form.url, self.form.assumes)
        return Component(weight.name, ceil(share * value / 8), formula=formula, numbers=numbers)
