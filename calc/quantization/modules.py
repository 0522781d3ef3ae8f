"""The names of a model's modules, as checkpoints write them, and which of them a list of names or patterns means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from calc.errors import InputError
from calc.model.weights import Part, Weight

MOST_PATTERNS: Final = 512
LONGEST: Final = 1000  # letters of a name or a pattern

Role = Literal["linear", "expert", "router", "scalar", "head", "embedding", "tower"]

# where checkpoints of several families keep a part of a layer
_PLACES: Final[dict[str, tuple[str, ...]]] = {
    "attention": ("self_attn", "attn", "attention", "mixer", "self_attention"),
    "cross_attention": ("cross_attn", "encoder_attn"),
    "mlp": ("mlp", "feed_forward", "ffn", "mixer"),
    "experts": tuple(
        f"{place}experts" for place in ("mlp.", "block_sparse_moe.", "feed_forward.", "mixer.", "ffn.", "")
    ),
    "experts_apart": ("experts", "moe.experts"),
    "shared_expert": (
        *("mlp.shared_experts", "mlp.shared_expert", "feed_forward.shared_expert", "mixer.shared_experts"),
        *("ffn.shared_experts", "block_sparse_moe.shared_experts"),
    ),
    "router": ("mlp", "block_sparse_moe", "feed_forward", "mixer", "ffn"),
    "indexer": ("self_attn.indexer", "attn.indexer"),
    "compressor": ("self_attn.compressor", "attn.compressor"),
    "delta_net": ("linear_attn",),
    "mamba": ("mixer", "mamba", "linear_attn"),
    "latent": ("mixer", "mlp"),
}
# what checkpoints call a projection of an MLP or an expert
_PROJECTIONS: Final = {
    "gate": ("gate_proj", "w1", "gate_up_proj"),
    "up": ("up_proj", "w3", "gate_up_proj"),
    "down": ("down_proj", "w2"),
    "router": ("gate", "router"),
}
_STEMS: Final = (
    *("model.layers", "model.language_model.layers", "language_model.model.layers", "backbone.layers", "layers"),
    *("transformer.h", "transformer.layers", "model.decoder.layers", "gpt_neox.layers", "transformer.encoder.layers"),
)
_TOWER: Final = re.compile(r"visual|vision|audio|mm_projector|multi_modal|image|mtp")
_STEM: Final = re.compile(r"^(.*?)\.\d+(?:\.|\*|$)")


@dataclass(frozen=True, slots=True)
class Site:
    """One weight as a checkpoint names it: its role, its layer (None outside the layers), and its names below the layer."""

    role: Role
    names: tuple[str, ...]
    layer: int | None = None


def site(part: Part, weight: Weight, layer: int, *, apart: bool = False) -> Site:
    """The site of a layer's weight. `apart`: its experts stand next to a dense MLP, and not in it (`MoE.apart`)."""
    role: Role = "router" if part.name == "router" else "expert" if part.expert else "linear"
    if weight.shape[0].size == 1:
        role = "scalar"
    place = part.name
    if apart:
        place = {"experts": "experts_apart", "shared_expert": "mlp"}.get(place, place)
    return Site(role, names_of(place, weight.name, weight.module, part.expert), layer)


@lru_cache(maxsize=1024)
def names_of(part: str, weight: str, module: str, expert: bool) -> tuple[str, ...]:
    """The names below its layer that a weight has in checkpoints; an expert's first, in its own module and in a stacked one."""
    places = _PLACES.get(part, (part,))
    known = _PROJECTIONS.get(weight, ()) if expert or part in ("router", "mlp", "shared_expert") else ()
    modules = dict.fromkeys((module, *known) if module else known or (weight,))
    found = [f"{place}.{name}" for place in places for name in modules]
    if expert:
        found += [f"{place}.0.{name}" for place in places for name in modules]
    if weight == "gate_scalar":
        found += [f"{place}.shared_expert_gate" for place in _PLACES["router"]]
    return tuple(found)


class Modules:
    """A list of module names and patterns ("re:" regular expressions and * wildcards), and which sites it means.

    A name means its module and everything below it; one without a layer's number means every module that has it in its path or at
    its end. Patterns are matched in linear time; `unread` are those that would need backtracking (look-around, back-references).
    """

    def __init__(self, entries: Iterable[Any], field: str) -> None:
        listed = list(entries)
        if set(map(type, listed)) - {str}:
            wrong = next(entry for entry in listed if type(entry) is not str)
            raise InputError.of(field, wrong, "it must be a list of module names")
        names = frozenset(listed)
        text = "\n".join(names)  # one search tells whether any of 100,000 names is a pattern
        marked = "*" in text or "re:" in text
        others = [entry for entry in listed if "*" in entry or entry[:3] == "re:"] if marked else []
        patterns = list(dict.fromkeys(entry for entry in others if not _is_start(entry)))
        if len(patterns) > MOST_PATTERNS:
            raise InputError(f"{field}: {len(patterns):,} patterns; at most {MOST_PATTERNS} are read", field)
        starts = {entry.rstrip("*").rstrip(".") for entry in others if _is_start(entry)}
        self.exact = names - frozenset(others) | starts if others else names
        heads = {entry.partition(".layers.")[0] for entry in self.exact}  # a name without layers is its own head
        rest = [head for head in heads if head in self.exact]
        stems = {f"{head}.layers": None for head in heads if head not in self.exact}
        stems |= {found[1]: None for entry in rest if (found := _STEM.match(entry))}
        self.stems = tuple(stems)
        self.words = tuple(entry for entry in rest if entry and not _STEM.match(entry))
        made = [_pattern(entry) for entry in patterns]
        self.patterns = tuple(pattern for pattern in made if pattern)
        self.unread = tuple(entry for entry, pattern in zip(patterns, made, strict=True) if not pattern)
        self.towers = any(_TOWER.search(entry) for entry in (*self.words, *patterns, *self.stems))

    @property
    def by_layer(self) -> bool:
        """Whether it tells one layer from another."""
        return bool(self.stems) or any(pattern.by_layer for pattern in self.patterns)

    def __bool__(self) -> bool:
        return bool(self.exact or self.patterns or self.unread)

    def means(self, where: Site) -> bool:
        """Whether the list names this site."""
        if where.layer is None:
            return any(self._outside(name) for name in where.names)
        return (
            self._exactly(where)
            or _words(self.words, where.names)
            or any(pattern.means(name, where.layer) for pattern in self.patterns for name in where.names)
        )

    def _outside(self, name: str) -> bool:
        return (
            name in self.exact
            or any(word.endswith(name) or name.endswith(word) for word in self.words)
            or any(pattern.matches(name) for pattern in self.patterns)
        )

    def _exactly(self, where: Site) -> bool:
        if not self.stems:
            return False
        for stem in self.stems:
            start = f"{stem}.{where.layer}"
            if start in self.exact:
                return True
            for path in _paths(where.names):
                if f"{start}.{path}" in self.exact:
                    return True
        return False


def _is_start(entry: str) -> bool:
    """Whether a pattern is the beginning of names alone: `model.layers.0.self_attn*`."""
    return not entry.startswith("re:") and entry.endswith("*") and not set(entry.rstrip("*")) & set("*?[")


@lru_cache(maxsize=1024)
def _paths(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names and the modules that hold them."""
    found: dict[str, None] = {}
    for name in names:
        while name:
            found[name] = None
            name = name.rpartition(".")[0]
    return tuple(found)


@lru_cache(maxsize=4096)
def _words(words: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Whether a word is part of the path of a name, or its end."""
    return any(name.endswith(word) or f".{word}." in f".{name}." for name in names for word in words)


def _pattern(entry: str) -> _Pattern | None:
    """A pattern ready to match; None where it is no regular expression of linear time."""
    from pydantic import StringConstraints, TypeAdapter

    if len(entry) > LONGEST:
        return None
    expression = entry[3:] if entry.startswith("re:") else _wildcard(entry)
    kind = Annotated[str, StringConstraints(pattern=f"^(?:{expression})")]
    try:  # pydantic's regular expressions are Rust's: no backtracking
        return _Pattern(TypeAdapter(kind).validator, expression)
    except Exception as error:
        if type(error).__name__ != "SchemaError":  # of pydantic's own engine, which exports no name for it
            raise
        return None


class _Pattern:
    """A regular expression over full names."""

    def __init__(self, validator: Any, expression: str) -> None:
        self.validator = validator
        self.by_layer = any(letter.isdigit() for letter in expression)
        self.floating = expression.startswith(".*")
        self.known: dict[tuple[str, int], bool] = {}

    def matches(self, name: str) -> bool:
        return bool(self.validator.isinstance_python(name))

    def means(self, name: str, layer: int) -> bool:
        """Whether it names a module of a layer, below any of the stems that checkpoints use."""
        key = (name, layer if self.by_layer else 0)
        if key not in self.known:
            stems = _STEMS[:1] if self.floating else _STEMS
            self.known[key] = any(self.matches(f"{stem}.{layer}.{name}") for stem in stems)
        return self.known[key]


def _wildcard(entry: str) -> str:
    """A wildcard as a regular expression; it means what lies below as well."""
    return re.escape(entry).replace(r"\*", ".*").replace(r"\?", ".") + r"(?:\.|$)"
