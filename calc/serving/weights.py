"""The weights as a serving engine holds them: per GPU, in their format, for a stage of the pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from calc.breakdown import Component, unique_names
from calc.model.spec import Layer, ModelSpec, Tower
from calc.model.weights import Part, Weight
from calc.quantization.format import LINEAR
from calc.quantization.leaves import part_leaves
from calc.quantization.modules import Role, Site, site
from calc.quantization.schemes import Scheme
from calc.serving.formats import GGML_SCHEMES, PLAIN, WeightFormat, weight_format
from calc.serving.gguf import embedding_type, fitting, head_type, layer_types
from calc.units import ceil_div


class Experts(NamedTuple):
    """The routed experts of one layer: bytes of all, how many there are, and how many a token uses."""

    bytes: int
    copies: int
    active: int


@dataclass(frozen=True, eq=False)
class StoredWeights:
    """One layer of each sort, the sort of every layer, and what the first and the last stage hold besides layers.

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
        """Bytes of what the first stage, the last stage, and the last of several hold besides layers."""
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
def stored_weights(spec: ModelSpec, name: str, tp: int, dp: int = 1) -> StoredWeights:
    """The weights of one tensor-parallel rank in that format; a spec hashes by identity, so a slider move finds them made."""
    return weights_in(spec, weight_format(spec, name), tp, dp)


@lru_cache(maxsize=64)
def checkpoint_weights(spec: ModelSpec) -> StoredWeights:
    """The weights as the checkpoint stores them: what is not quantised in the config's own type."""
    wide = PLAIN.get(spec.dtype, PLAIN["bf16"])
    return weights_in(spec, WeightFormat("auto", spec.dtype, wide.compute, wide, spec.quantization))


def weights_in(spec: ModelSpec, form: WeightFormat, tp: int = 1, dp: int = 1) -> StoredWeights:
    """The weights of one tensor-parallel rank, its experts shared by `dp` data-parallel ranks as well."""
    store = _Gguf(spec, form, tp, dp) if form.ftype else _Store(spec, form, tp, dp)
    index: dict[tuple[int, ...], int] = {}
    pattern: list[int] = []
    sorts: list[Component] = []
    experts: list[Experts] = []
    reread: list[int] = []
    for at, kind_index in enumerate(spec.layers.pattern):
        kind, parts = spec.layers.kinds[kind_index], spec.layers.kind_parts[kind_index]
        key = (kind_index, *store.signature(at, kind_index))
        if key not in index:
            index[key] = len(sorts)
            sorts.append(store.layer(kind, parts, at))
            experts.append(_experts(sorts[-1], parts))
            again = tuple(replace(part, copies=part.active) for part in parts if not part.copies)
            reread.append(int(store.layer(kind, again, at).total))
        pattern.append(index[key])
    embedding = Component("embedding", children=store.ends(Part("embedding", spec.embeddings)))
    first = [embedding, *(store.tower(tower) for tower in spec.towers if tower.in_total)]
    norm = spec.final_norm.weights if spec.final_norm else ()
    ending = (Part("final_norm", norm), Part("head", spec.head), *spec.other)
    last = [Component(part.name, children=store.ends(part)) for part in ending]
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


def scheme_of(spec: ModelSpec, form: WeightFormat, part: Part, weight: Weight, layer: int) -> Scheme:
    """The scheme that the format stores a weight of that layer in."""
    return _Store(spec, form, 1).scheme(part, weight, layer)


def _experts(layer: Component, parts: tuple[Part, ...]) -> Experts:
    for part in parts:
        if part.expert:
            return Experts(int(layer.child(part.name).total), part.copies, part.active)
    return Experts(0, 1, 1)


def _multiplies(weight: Weight) -> bool:
    """Whether the weight is that of a linear layer, which formats store in their own way."""
    return weight.matmul and not weight.convolution and len(weight.shape) == 2


class _Store:
    """The scheme of each weight by what the format declares, and the tensors that follow, for one tensor-parallel rank."""

    def __init__(self, spec: ModelSpec, form: WeightFormat, tp: int, dp: int = 1) -> None:
        self.spec, self.form, self.tp, self.dp = spec, form, tp, dp
        self.quantization = own = form.quantization
        self.roles: frozenset[Role] = own.roles if own else frozenset()
        if own and own.in_experts and not any(part.expert for parts in spec.layers.kind_parts for part in parts):
            self.roles = LINEAR
        self.apart = [getattr(kind.feed_forward, "apart", False) for kind in spec.layers.kinds]

    def layer(self, kind: Layer, parts: tuple[Part, ...], at: int) -> Component:
        kv = getattr(kind.mixer, "num_key_value_heads", 0)
        children = [
            Component(
                part.name,
                children=part_leaves(part, lambda part, weight: self.scheme(part, weight, at), self.tp, kv),
                count=ceil_div(part.copies, self.dp) if part.expert else part.copies,
            )
            for part in parts
            if part.copies
        ]
        return Component(kind.kind, children=unique_names([child for child in children if child.children]))

    def signature(self, at: int, kind_index: int) -> tuple[int, ...]:
        """What tells this layer's schemes from those of another layer of its kind."""
        if not self.quantization or not self.quantization.by_layer:
            return ()
        parts = self.spec.layers.kind_parts[kind_index]
        return tuple(id(self.scheme(part, weight, at)) for part in parts for weight in part.weights if weight.matmul)

    def scheme(self, part: Part, weight: Weight, at: int) -> Scheme:
        """The scheme of a layer's weight."""
        if not _multiplies(weight):
            return self.form.wide
        apart = self.apart[self.spec.layers.pattern[at]]
        return self._chosen(site(part, weight, at, apart=apart), weight)

    def _chosen(self, where: Site, weight: Weight) -> Scheme:
        own = self.quantization
        if own is None or weight.shape[1].size % own.least_columns:
            return self.form.wide
        return own.scheme_of(where, self.roles) or self.form.wide

    def ends(self, part: Part) -> tuple[Component, ...]:
        """The tensors of what stands outside the layers: the embedding, the head and what else there is."""
        return part_leaves(part, self._end, self.tp)

    def _end(self, part: Part, weight: Weight) -> Scheme:
        if part.name == "embedding":
            return self._chosen(_EMBEDDING, weight) if weight.name == "token" else self.form.wide
        if not _multiplies(weight):
            return self.form.wide
        where = _HEAD if part.name == "head" else Site("linear", (f"{part.name}.{weight.module or weight.name}",))
        return self._chosen(where, weight)

    def tower(self, tower: Tower) -> Component:
        """A tower, whole on every rank; most checkpoints leave it as it is."""
        layers = [
            Component(kind.kind, children=self._tower_parts(parts), count=count)
            for kind, parts, count in zip(tower.stack.kinds, tower.stack.kind_parts, tower.stack.counts, strict=True)
        ]
        return Component(
            tower.name,
            children=unique_names([*self._tower_parts(tower.parts), *(part for part in layers if part.children)]),
        )

    def _tower_parts(self, parts: Iterable[Part]) -> tuple[Component, ...]:
        made = [Component(part.name, children=part_leaves(part, self._in_tower), count=part.copies) for part in parts]
        return unique_names([part for part in made if part.children])

    def _in_tower(self, part: Part, weight: Weight) -> Scheme:
        if not self.quantization or "tower" not in self.roles or not _multiplies(weight):
            return self.form.wide if not self.form.ftype else PLAIN["bf16"]
        names = (f"visual.{part.name}.{weight.module or weight.name}",)
        return self._chosen(Site("tower", names), weight)


_HEAD = Site("head", ("lm_head", "language_model.lm_head", "output", "embed_out", "head"))
_EMBEDDING = Site("embedding", ("model.embed_tokens", "language_model.model.embed_tokens", "embed_tokens"))


class _Gguf(_Store):
    """The types that llama-quantize gives each tensor."""

    def __init__(self, spec: ModelSpec, form: WeightFormat, tp: int, dp: int = 1) -> None:
        super().__init__(spec, form, tp, dp)
        kinds = spec.layers.kinds
        self.types = [layer_types(form.ftype, spec, at, kinds[index]) for at, index in enumerate(spec.layers.pattern)]

    def signature(self, at: int, kind_index: int) -> tuple[int, ...]:
        return (hash(self.types[at]),)

    def scheme(self, part: Part, weight: Weight, at: int) -> Scheme:
        types = dict(self.types[at])
        if not weight.matmul or part.name == "router" or weight.shape[0].size == 1:
            return self.form.wide
        if self.form.ftype == "MXFP4_MOE" and part.expert:
            return GGML_SCHEMES["MXFP4"]
        return GGML_SCHEMES[fitting(types.get(weight.name, types[""]), weight.shape[-1].size)]

    def _end(self, part: Part, weight: Weight) -> Scheme:
        table = len(weight.shape) == 2 and part.name in ("embedding", "head") and weight.name in ("token", "weight")
        if not table and not (weight.matmul and weight.shape[0].size > 1):
            return self.form.wide
        own = part.name == "embedding" and not self.spec.tied
        kind = embedding_type(self.form.ftype) if own else head_type(self.form.ftype)
        return GGML_SCHEMES[fitting(kind, weight.shape[-1].size)]
