"""FLOPs of one token in training, part by part: 2 a weight forward, twice that backward, and attention by its mask.

Two conventions: `causal` counts the half of the square below the diagonal (the diagonal by half); `square` counts every key
of the sequence, as the PaLM paper and PyTorch's FlopCounterMode do. A window counts the band that it leaves in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from calc.breakdown import Component, Formula, Number, unique_names
from calc.model.mixers import Attention, CompressedAttention, Indexer, LatentAttention, Mixer, Recurrence
from calc.model.spec import ModelSpec, Stack, Tower
from calc.model.weights import Part, Weight, dim

_PALM = "PaLM, arXiv 2204.02311, appendix B"
_PALM_URL = "https://arxiv.org/abs/2204.02311"
_MATMUL = ("2 FLOPs a weight and token forward, 4 backward", "norms, activations, biases and look-ups are not counted")
_SQUARE = ("every query meets every key that its window leaves: no saving for the causal mask",)
_CAUSAL = ("half of the square: the keys after a query are not computed; the diagonal counts by half",)
_ROUNDED = "rounded up to whole FLOPs a token"

AnyAttention = Attention | LatentAttention | CompressedAttention


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
    """FLOPs of one token, the mean over a sequence of `seq` tokens.

    Where layers attend to an encoder's output, the encoder reads as many tokens as the decoder, and its FLOPs are counted with
    each of the decoder's tokens. Vision and audio towers are not counted: they read no tokens.
    """
    stack, attention = _stack("layers", spec.layers, seq, causal)
    head = _head(spec)
    parts = [stack, *(_part(part) for part in spec.other), head]
    layers_total = int(stack.total)
    for tower in encoders(spec):
        layers, more = _stack("layers", tower.stack, seq, causal)
        layers_total += int(layers.total)
        own = [_part(part) for part in tower.parts]
        parts.append(Component(tower.name, children=tuple(part for part in (*own, layers) if part.children)))
        attention += more
    found = tuple(part for part in parts if part.children)
    forward = sum(int(part.total) for part in found) // 3
    return TokenFlops(found, forward, layers_total // 3, attention // 3, int(head.total) // 3)


def encoders(spec: ModelSpec) -> tuple[Tower, ...]:
    """The towers that read the same text as the decoder: those of a model whose layers attend to an encoder's output."""
    if not any(kind.cross for kind in spec.layers.kinds):
        return ()
    return tuple(tower for tower in spec.towers if tower.in_total and len(tower.stack))


def _stack(name: str, stack: Stack, seq: int, causal: bool) -> tuple[Component, int]:
    """The layers, once with their count or one node a kind, and the FLOPs of their attention scores and values."""
    kinds, attention = [], 0
    for kind, parts, count in zip(stack.kinds, _matmuls(stack), stack.counts, strict=True):
        children = parts
        for mixer in kind.mixers:
            mixing = tuple(_mixing(mixer, seq, causal))
            if not isinstance(mixer, Recurrence):
                attention += count * sum(int(leaf.total) for leaf in mixing)
            children = _joined(mixer.parts[0].name, children, mixing)
        if kind.cross:
            cross = _core(kind.cross, seq, causal=False)
            attention += count * int(cross.total)
            children = tuple(
                replace(part, children=(*part.children, cross)) if part.name == "cross_attention" else part
                for part in children
            )
        kinds.append(Component(kind.kind, children=children, count=count))
    kinds = [kind for kind in kinds if kind.children]
    if len(kinds) == 1:
        return replace(kinds[0], name=name), attention
    return Component(name, children=unique_names(kinds)), attention


@lru_cache(maxsize=128)
def _matmuls(stack: Stack) -> tuple[tuple[Component, ...], ...]:
    """The weight matmuls of each kind of layer; they depend on no plan, so a slider move finds them made."""
    return tuple(tuple(node for node in (_part(part) for part in parts) if node.children) for parts in stack.kind_parts)


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


def _joined(name: str, parts: tuple[Component, ...], mixing: tuple[Component, ...]) -> tuple[Component, ...]:
    """The matmuls, with what mixes tokens put into the mixer's own part, which has that name."""
    if name not in {part.name for part in parts}:
        return (Component(name, children=mixing), *parts) if mixing else parts
    return tuple(replace(part, children=(*part.children, *mixing)) if part.name == name else part for part in parts)


def _mixing(mixer: Mixer, seq: int, causal: bool) -> Iterator[Component]:
    """The FLOPs that depend on other tokens: scores and values, an indexer's scores, a recurrence's scan."""
    if isinstance(mixer, Recurrence):
        source = f"{mixer.kind}: FLOPs of the recurrence for one token"
        formula = Formula(rf"3 \cdot ({mixer.flops.latex})", source, "", ("backward is twice forward",))
        yield Component("scan", 3 * mixer.flops.size, formula=formula, numbers=dict(mixer.flops.numbers))
    else:
        causal = causal and mixer.causal
        yield _core(mixer, seq, causal)
        every = 1
        if isinstance(mixer, CompressedAttention) and mixer.compress:
            every = mixer.compress
            chosen = mixer.indexer.topk if mixer.indexer else 0
            yield _scores("compressed_core", mixer, _entries(seq, chosen, every, causal), causal)
        if mixer.indexer:
            yield _indexer(mixer.indexer, _entries(seq, 0, every, causal), causal)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The mean number of keys that a query meets: `over / under`, and its formula."""

    over: int
    under: int
    latex: str
    numbers: dict[str, Number]


def _entries(seq: int, most: int, every: int, causal: bool) -> _Keys:
    """Mean keys of a query where each `every` tokens leave one, of which it meets at most `most` (0: all)."""
    numbers: dict[str, Number] = {"s": seq}
    times = ""
    if every > 1:
        numbers["m"], times = every, r" \cdot <m>"
    if 0 < most * every < seq:
        if not causal:
            return _Keys(most, 1, "<W>", {"W": most})
        numbers["W"] = most
        latex = rf"\frac{{<W> \cdot (2 \cdot <s> - <W>{times})}}{{2 \cdot <s>}}"
        return _Keys(most * (2 * seq - most * every), 2 * seq, latex, numbers)
    if causal:
        return _Keys(seq, 2 * every, rf"\frac{{<s>}}{{2{times}}}", numbers)
    return _Keys(seq, every, r"\frac{<s>}{<m>}" if every > 1 else "<s>", numbers)


def _chunks(seq: int, chunk: int, causal: bool) -> _Keys:
    """Mean keys of a query that meets the keys of its own chunk."""
    whole, rest = divmod(seq, chunk)
    numbers: dict[str, Number] = {"s": seq, "c": chunk, "n_c": whole, "r": rest}
    half = 2 if causal else 1
    under = r"2 \cdot <s>" if causal else "<s>"
    latex = rf"\frac{{<n_c> \cdot <c>^{{2}} + <r>^{{2}}}}{{{under}}}"
    return _Keys(whole * chunk**2 + rest**2, half * seq, latex, numbers)


def _core(mixer: AnyAttention, seq: int, causal: bool) -> Component:
    """Scores and values of every key, of a window, of a chunk, or of the keys that an indexer chose; MLA with its heads
    expanded, as training computes it."""
    if isinstance(mixer, Attention) and 0 < mixer.chunk < seq:
        return _scores("core", mixer, _chunks(seq, mixer.chunk, causal), causal)
    if isinstance(mixer, LatentAttention):
        most = mixer.indexer.topk if mixer.indexer else 0
    else:
        most = mixer.window or (mixer.indexer.topk if isinstance(mixer, Attention) and mixer.indexer else 0)
    return _scores("core", mixer, _entries(seq, most, 1, causal), causal)


def core_flops(mixer: AnyAttention, seq: int, causal: bool) -> int:
    """Forward FLOPs of one token's scores and values."""
    return int(_core(mixer, seq, causal and mixer.causal).total) // 3


def _scores(name: str, mixer: AnyAttention, keys: _Keys, causal: bool) -> Component:
    """2 FLOPs a key and feature for the scores, and 2 for the values."""
    heads, d = mixer.num_attention_heads, mixer.head_dim
    v = d if isinstance(mixer, CompressedAttention) else mixer.v_head_dim
    passes = mixer.passes if isinstance(mixer, Attention) else 1
    numbers: dict[str, Number] = {"a": heads, "d": d, **keys.numbers}
    a_key = rf"{4 * passes} \cdot <a> \cdot <d>"
    if v != d:
        a_key = rf"{2 * passes} \cdot <a> \cdot (<d> + <d_v>)"
        numbers["d_v"] = v
    return _mean_leaf(name, 2 * passes * heads * (d + v), a_key, keys, numbers, causal)


def _indexer(indexer: Indexer, keys: _Keys, causal: bool) -> Component:
    """The indexer scores every key with its own small heads."""
    numbers: dict[str, Number] = {"a_i": indexer.heads, "d_i": indexer.head_dim, **keys.numbers}
    a_key = r"2 \cdot <a_i> \cdot <d_i>"
    return _mean_leaf("indexer_scores", 2 * indexer.heads * indexer.head_dim, a_key, keys, numbers, causal)


def _mean_leaf(name: str, a_key: int, latex: str, keys: _Keys, numbers: dict[str, Number], causal: bool) -> Component:
    """A leaf of `a_key` FLOPs a key and query forward, times 3 for backward, over the mean number of keys."""
    value = -(-a_key * keys.over // keys.under)
    whole = keys.under <= 2
    product = rf"{latex} \cdot {keys.latex}"
    formula = Formula(
        rf"3 \cdot {product}" if whole else rf"3 \cdot \lceil {product} \rceil",
        _PALM if not causal else f"{_PALM}, halved for the causal mask",
        _PALM_URL,
        (*(_CAUSAL if causal else _SQUARE), "2 FLOPs forward and 4 backward", *(() if whole else (_ROUNDED,))),
    )
    return Component(name, 3 * value, formula=formula, numbers=numbers)
