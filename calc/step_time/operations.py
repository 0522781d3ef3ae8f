"""The operations of one layer on one rank, with their shapes: matrix products, attention, experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from calc.model.feed_forward import MoE
from calc.model.mixers import Attention, CompressedAttention, LatentAttention, Mixer, Recurrence
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Part, Split, Weight
from calc.units import ceil_div


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one rank's share of a micro-batch is cut: `tokens` = sequences · seq / cp, of which sequence parallelism leaves
    1 / tp between the tensor-parallel products."""

    tokens: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    joins_projections: bool = False  # one product for query, key and value, and one for gate and up
    whole_experts: bool = False  # ep · tp ranks share the experts, which tp does not divide

    @property
    def between(self) -> int:
        """Tokens that a rank holds between the tensor-parallel products."""
        return ceil_div(self.tokens, self.tp) if self.sequence_parallel else self.tokens


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product [m, k] x [k, n], the weight being [n, k]; `groups` of them where experts have their own weights and m tokens
    each. The backward has two as large: for the input [m, n] x [n, k], and for the weight [n, m] x [m, k]."""

    name: str
    m: int
    n: int
    k: int
    groups: int = 1
    part: str = ""
    module: str = ""
    bias: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.groups


@dataclass(frozen=True, slots=True)
class Core:
    """Attention's scores and values on one rank, whole heads of whole sequences: `batch` sequences of `seq` tokens, each
    rank of `cp` doing its share. `latent`: keys and values come expanded from one latent (MLA), `head_dim` wide and `v_head_dim`."""

    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int
    causal: bool
    cp: int
    latent: bool = False


@dataclass(frozen=True, slots=True)
class LayerOperations:
    """What one layer runs in forward. `scans` are FLOPs of recurrences for the rank's tokens."""

    kind: Layer
    gemms: tuple[Gemm, ...]
    cores: tuple[Core, ...]
    scans: int
    parameters: int  # of the rank, experts apart
    expert_parameters: int


def layer_operations(layer: Layer, seq: int, sharding: Sharding) -> LayerOperations:
    """The products, attention and scans of a layer, and the parameters that its rank holds."""
    gemms = [gemm for part in layer.parts for gemm in _products(part, layer, sharding)]
    if sharding.joins_projections:
        gemms = _joined(gemms)
    mixers = (*layer.mixers, *((layer.cross,) if layer.cross else ()))
    cores = tuple(core for mixer in mixers for core in _cores(mixer, seq, sharding))
    scans = sum(mixer.flops.size * sharding.tokens // sharding.tp for mixer in mixers if isinstance(mixer, Recurrence))
    plain, experts = layer_parameters(layer, sharding.tp, sharding.ep)
    return LayerOperations(layer, tuple(gemms), cores, scans, plain, experts)


def layer_parameters(layer: Layer, tp: int, ep: int) -> tuple[int, int]:
    """Parameters of one rank: those that every data-parallel rank holds, and those of its own experts."""
    plain = experts = 0
    for part in layer.parts:
        size = sum(_held(weight, tp) for weight in part.weights)
        if part.expert:
            experts += size * part.copies // ep
        else:
            plain += size * part.copies
    return plain, experts


def head_gemms(spec: ModelSpec, sharding: Sharding) -> tuple[Gemm, ...]:
    """The output head's product, its vocabulary divided by tp; () for a model without a head."""
    if not spec.has_head:
        return ()
    return (Gemm("head", sharding.tokens, ceil_div(spec.vocab_size, sharding.tp), spec.hidden_size, part="head"),)


def end_parameters(spec: ModelSpec, tp: int) -> tuple[int, int]:
    """Parameters of a rank outside the layers: on the first stage, and on the last (a tied head counts on both)."""
    first = sum(_held(weight, tp) for weight in spec.embeddings)
    last = sum(_held(weight, tp) for weight in spec.head)
    if spec.tied and spec.has_head:
        last += ceil_div(spec.vocab_size, tp) * spec.hidden_size
    if spec.final_norm:
        last += sum(weight.parameters for weight in spec.final_norm.weights)
    return first, last


def _held(weight: Weight, tp: int) -> int:
    return weight.parameters if weight.split == Split.NONE else ceil_div(weight.parameters, tp)


def _products(part: Part, layer: Layer, sharding: Sharding) -> Iterator[Gemm]:
    moe = layer.feed_forward if isinstance(layer.feed_forward, MoE) else None
    biased = {weight.name.removesuffix("_bias") for weight in part.weights if weight.name.endswith("_bias")}
    for weight in part.weights:
        if not weight.matmul:
            continue
        n, k = weight.shape[0].size, prod(dimension.size for dimension in weight.shape[1:])
        tokens = sharding.tokens
        whole = part.expert and sharding.whole_experts
        if whole:
            pass
        elif weight.split in (Split.OUTPUT, Split.KV, Split.VOCAB):
            n = ceil_div(n, sharding.tp)
        elif weight.split == Split.INPUT:
            k = ceil_div(k, sharding.tp)
        else:
            tokens = sharding.between  # a copied weight works on the rank's own part of the sequence
        if part.expert and moe:
            groups = max(1, part.copies // (sharding.ep * (sharding.tp if whole else 1)))
            each = ceil_div(sharding.tokens * moe.num_experts_per_tok * sharding.ep, part.copies)
            yield Gemm(weight.name, each, n, k, groups, part.name, weight.module)
        else:
            yield Gemm(weight.name, tokens, n, k, part.active, part.name, weight.module, weight.name in biased)


_TOGETHER = (("query", "key", "value"), ("gate", "up"))


def _joined(gemms: list[Gemm]) -> list[Gemm]:
    """Neighbours that read the same input as one product: query, key and value; gate and up."""
    found: list[Gemm] = []
    for gemm in gemms:
        last = found[-1] if found else None
        together = last and any(last.name.split("_and_")[-1] in names and gemm.name in names for names in _TOGETHER)
        if last and together and (last.part, last.m, last.k, last.groups) == (gemm.part, gemm.m, gemm.k, gemm.groups):
            found[-1] = replace(last, name=f"{last.name}_and_{gemm.name}", n=last.n + gemm.n)
        else:
            found.append(gemm)
    return found


def _cores(mixer: Mixer | Attention, seq: int, sharding: Sharding) -> Iterator[Core]:
    if isinstance(mixer, Recurrence):
        return
    heads = ceil_div(mixer.num_attention_heads, sharding.tp)
    kv_heads = max(1, mixer.num_key_value_heads // sharding.tp)
    if isinstance(mixer, LatentAttention):
        chosen = mixer.indexer.topk if mixer.indexer else 0
        yield Core(seq, heads, heads, mixer.head_dim, mixer.v_head_dim, chosen, mixer.causal, sharding.cp, latent=True)
    elif isinstance(mixer, CompressedAttention):
        entries = seq // mixer.compress if mixer.compress else 0
        chosen = min(entries, mixer.indexer.topk) if mixer.indexer else entries // 2
        window = mixer.window + chosen
        yield Core(seq, heads, kv_heads, mixer.head_dim, mixer.head_dim, window, mixer.causal, sharding.cp)
    else:
        chosen = mixer.window or mixer.chunk or (mixer.indexer.topk if mixer.indexer else 0)
        for _ in range(mixer.passes):
            yield Core(seq, heads, kv_heads, mixer.head_dim, mixer.v_head_dim, chosen, mixer.causal, sharding.cp)


@lru_cache(maxsize=512)
def stack_operations(spec: ModelSpec, seq: int, sharding: Sharding) -> tuple[LayerOperations, ...]:
    """The operations of each kind of layer, made once."""
    return tuple(layer_operations(kind, seq, sharding) for kind in spec.layers.kinds)
