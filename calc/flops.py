"""FLOPs of one token in training, part by part: 2 a weight forward, twice that backward, and attention by its mask.

Two conventions: `causal` counts the half of the square below the diagonal (the diagonal by half); `square` counts every key
of the sequence, as the PaLM paper and PyTorch's FlopCounterMode do. A window counts the band that it leaves in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from calc.breakdown import Component, Formula, Number, unique_names
from calc.errors import InputError
from calc.model.mixers import Attention, Indexer, LatentAttention, Mixer, Recurrence
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Part, Weight, dim

_PALM = "PaLM, arXiv 2204.02311, appendix B"
_PALM_URL = "https://arxiv.org/abs/2204.02311"
_MATMUL = ("2 FLOPs a weight and token forward, 4 backward", "norms, activations, biases and look-ups are not counted")
_SQUARE = ("every query meets every key that its window leaves: no saving for the causal mask",)
_CAUSAL = ("half of the square: the keys after a query are not computed; the diagonal counts by half",)
_ROUNDED = "rounded up to whole FLOPs a token"


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """FLOPs of one token: `parts` holds forward and backward; the counts are forward alone.

    `layers` are those of the layers (what full recomputation repeats), `attention` those of scores and values (what selective
    recomputation repeats), `head` those of the output head.
    """

    parts: tuple[Component, ...]
    forward: int
    layers: int
    attention: int
    head: int


@lru_cache(maxsize=256)
def token_flops(spec: ModelSpec, seq: int, causal: bool) -> TokenFlops:
    """FLOPs of one token, the mean over a sequence of `seq` tokens. InputError for a model that reads an encoder's output."""
    if any(kind.cross for kind in spec.layers.kinds):
        raise InputError(
            f"architectures: {spec.architecture} attends to an encoder's output; FLOPs are counted for decoders and encoders alone",
            "architectures",
        )
    layers, attention = [], 0
    for kind, parts, count in zip(spec.layers.kinds, _matmuls(spec), spec.layers.counts, strict=True):
        mixing = tuple(_mixing(kind, seq, causal))
        if not isinstance(kind.mixer, Recurrence):
            attention += count * sum(int(leaf.total) for leaf in mixing)
        layers.append(Component(kind.kind, children=_joined(kind, parts, mixing), count=count))
    stack = _stack(layers)
    head = _head(spec)
    other = [_part(part) for part in spec.other]
    found = tuple(part for part in (stack, *other, head) if part.children)
    return TokenFlops(
        found, sum(int(part.total) for part in found) // 3, int(stack.total) // 3, attention // 3, int(head.total) // 3
    )


def _stack(kinds: list[Component]) -> Component:
    kinds = [kind for kind in kinds if kind.children]
    if len(kinds) == 1:
        return Component("layers", children=kinds[0].children, count=kinds[0].count)
    return Component("layers", children=unique_names(kinds))


@lru_cache(maxsize=64)
def _matmuls(spec: ModelSpec) -> tuple[tuple[Component, ...], ...]:
    """The weight matmuls of each kind of layer; they depend on no plan, so a slider move finds them made."""
    return tuple(
        tuple(node for node in (_part(part) for part in parts) if node.children) for parts in spec.layers.kind_parts
    )


def _part(part: Part) -> Component:
    leaves = [_matmul(weight) for weight in part.weights if weight.matmul]
    return Component(part.name, children=unique_names(leaves), count=part.active)


def _matmul(weight: Weight) -> Component:
    formula = Formula(rf"6 \cdot {weight.latex}", _PALM, _PALM_URL, _MATMUL)
    return Component(weight.name, 6 * weight.parameters, formula=formula, numbers=weight.numbers)


def _head(spec: ModelSpec) -> Component:
    """The head: its own weights, or the token table once more when tied."""
    weights = spec.head
    if spec.has_head and spec.tied:
        weights = (Weight("weight", (dim("V", spec.vocab_size), dim("h", spec.hidden_size)), matmul=True), *weights)
    return _part(Part("head", weights))


def _joined(kind: Layer, parts: tuple[Component, ...], mixing: tuple[Component, ...]) -> tuple[Component, ...]:
    """The matmuls, with what mixes tokens put into the mixer's own part (the first)."""
    if not mixing or kind.mixer is None:
        return parts
    name = kind.mixer.parts[0].name
    if parts and parts[0].name == name:
        return (Component(name, children=(*parts[0].children, *mixing)), *parts[1:])
    return (Component(name, children=mixing), *parts)


def _mixing(kind: Layer, seq: int, causal: bool) -> Iterator[Component]:
    """The FLOPs that depend on other tokens: scores and values, an indexer's scores, a recurrence's scan."""
    mixer = kind.mixer
    if isinstance(mixer, Recurrence):
        source = f"{mixer.kind}: FLOPs of the recurrence for one token"
        formula = Formula(rf"3 \cdot ({mixer.flops.latex})", source, "", ("backward is twice forward",))
        yield Component("scan", 3 * mixer.flops.size, formula=formula, numbers=dict(mixer.flops.numbers))
    elif mixer:
        yield _core(mixer, seq, causal)
        if isinstance(mixer, LatentAttention) and mixer.indexer:
            yield _indexer(mixer.indexer, seq, causal and mixer.causal)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The mean number of keys that a query meets: `over / under`, and its formula."""

    over: int
    under: int
    latex: str
    numbers: dict[str, Number]


def _keys(seq: int, window: int, chunk: int, causal: bool) -> _Keys:
    """Mean keys of a query: all, a window, or the chunk that it is in; half of each below the diagonal when causal."""
    half = 2 if causal else 1
    if 0 < window < seq:
        numbers: dict[str, Number] = {"s": seq, "W": window}
        if not causal:
            return _Keys(window, 1, "<W>", {"W": window})
        return _Keys(
            window * (2 * seq - window), 2 * seq, r"\frac{<W> \cdot (2 \cdot <s> - <W>)}{2 \cdot <s>}", numbers
        )
    if 0 < chunk < seq:
        whole, rest = divmod(seq, chunk)
        numbers = {"s": seq, "c": chunk, "n_c": whole, "r": rest}
        under = r"2 \cdot <s>" if causal else "<s>"
        return _Keys(
            whole * chunk**2 + rest**2, half * seq, rf"\frac{{<n_c> \cdot <c>^{{2}} + <r>^{{2}}}}{{{under}}}", numbers
        )
    return _Keys(seq, half, r"\frac{<s>}{2}" if causal else "<s>", {"s": seq})


def _core(mixer: Attention | LatentAttention, seq: int, causal: bool) -> Component:
    """Scores and values: 2 FLOPs a key and feature of each; MLA with its heads expanded, as training computes it."""
    causal = causal and mixer.causal
    window, chunk = _reach(mixer)
    keys = _keys(seq, window, chunk, causal)
    heads, d, v = mixer.num_attention_heads, mixer.head_dim, mixer.v_head_dim
    numbers: dict[str, Number] = {"a": heads, "d": d, **keys.numbers}
    a_head = r"4 \cdot <a> \cdot <d>"
    if v != d:
        a_head = r"2 \cdot <a> \cdot (<d> + <d_v>)"
        numbers["d_v"] = v
    return _mean_leaf("core", 2 * heads * (d + v), a_head, keys, numbers, causal)


def _reach(mixer: Mixer) -> tuple[int, int]:
    """(window, chunk) of a mixer; a sparse attention's query meets at most its indexer's `topk` keys, as in a window."""
    if isinstance(mixer, Attention):
        return mixer.window, mixer.chunk
    return (mixer.indexer.topk, 0) if isinstance(mixer, LatentAttention) and mixer.indexer else (0, 0)


def _indexer(indexer: Indexer, seq: int, causal: bool) -> Component:
    """The indexer scores every key with its own small heads."""
    keys = _keys(seq, 0, 0, causal)
    numbers: dict[str, Number] = {"a_I": indexer.heads, "d_I": indexer.head_dim, **keys.numbers}
    return _mean_leaf(
        "indexer_scores", 2 * indexer.heads * indexer.head_dim, r"2 \cdot <a_I> \cdot <d_I>", keys, numbers, causal
    )


def _mean_leaf(name: str, a_key: int, latex: str, keys: _Keys, numbers: dict[str, Number], causal: bool) -> Component:
    """A leaf of `a_key` FLOPs a key and query forward, times 3 for backward, over the mean number of keys."""
    value = -(-a_key * keys.over // keys.under)
    whole = keys.under <= 2 and a_key * keys.over % keys.under == 0
    product = rf"{latex} \cdot {keys.latex}"
    formula = Formula(
        rf"3 \cdot {product}" if whole else rf"3 \cdot \lceil {product} \rceil",
        _PALM if not causal else f"{_PALM}, halved for the causal mask",
        _PALM_URL,
        (*(_CAUSAL if causal else _SQUARE), "2 FLOPs forward and 4 backward", *(() if whole else (_ROUNDED,))),
    )
    return Component(name, 3 * value, formula=formula, numbers=numbers)
