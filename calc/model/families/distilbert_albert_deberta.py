"""More of BERT's kin: DistilBERT, ALBERT, MPNet, DeBERTa, Longformer, LayoutLM and I-BERT, which differ in positions and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.bert_roberta import Traits, bert
from calc.model.families.common import (
    LAYER_NORM,
    assemble,
    attention,
    dropouts,
    hidden,
    mlp,
    num_layers,
    position_table,
    uniform,
    whole_heads,
)
from calc.model.fields import Fields
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Dim, Norm, Part, Weight, dim, linear

_DROPOUT: Final = {
    "attention": "attention_probs_dropout_prob",
    "residual": "hidden_dropout_prob",
    "embedding": "hidden_dropout_prob",
}
_DISTILBERT: Final = {"dim": "hidden_size", "hidden_dim": "intermediate_size"}


def renamed(fields: Fields, names: Mapping[str, str]) -> None:
    """Give fields that only this class calls otherwise their usual names, in the config and in its defaults."""
    fields.data = {names.get(key, key): value for key, value in fields.data.items()}
    fields.defaults = {names.get(key, key): value for key, value in fields.defaults.items()}


def _mixer(fields: Fields, letters: str, modules: tuple[str, str, str, str], **traits: Any) -> Attention:
    return attention(
        fields, sizes=whole_heads(fields), bias=letters, modules=modules, causal=False, rotary=False, **traits
    )


def _layer(fields: Fields, mixer: Attention) -> Layer:
    """A layer whose norms follow each half, with a plain MLP."""
    h = dim("h", hidden(fields))
    forward = mlp(fields, gated=False, bias=True, modules=("", "dense", "dense"))
    return Layer(
        "layer", mixer, forward, tuple(Norm(name, h, **LAYER_NORM) for name in ("attention_norm", "output_norm"))
    )


def _encoder(
    fields: Fields,
    layers: Stack,
    tables: tuple[Weight, ...],
    other: tuple[Part, ...] = (),
    width: Dim | None = None,
    normed: Dim | None = None,
) -> ModelSpec:
    """The encoder around its layers, with a language-model head: a dense layer and a norm before the tied table of `width`. The norm of
    the embedding is over `normed`: of `width` where it comes before the projection to the hidden size."""
    h = dim("h", hidden(fields))
    narrow = width or h
    dense = linear("dense", "dense", narrow, h, bias=True)
    head = Part("head_transform", (*dense, *Norm("norm", narrow, **LAYER_NORM).weights))
    fields.ignore("classifier_dropout", "classifier_dropout_prob", "layer_norm_eps", "position_embedding_type")
    return assemble(
        fields,
        layers,
        tied=True,
        embeddings=(*tables, *Norm("norm", normed or narrow, **LAYER_NORM).weights),
        no_final_norm=True,
        head_bias=True,
        token=narrow,
        other=(*other, head),
        dropout=dropouts(fields, **_DROPOUT),
    )


def distilbert(fields: Fields) -> ModelSpec:
    """DistilBERT (arXiv 1910.01108): BERT with half the layers and no token types."""
    renamed(fields, _DISTILBERT)
    mixer = _mixer(fields, "qkvo", ("q_lin", "k_lin", "v_lin", "out_lin"))
    fields.ignore("dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_")
    return _encoder(fields, uniform(fields, _layer(fields, mixer)), (position_table(fields),))


def albert(fields: Fields) -> ModelSpec:
    """ALBERT (arXiv 1909.11942): each group of layers has the weights of one, and the embedding is narrow."""
    mixer = _mixer(fields, "qkvo", ("query", "key", "value", "dense"))
    if (inner := fields.size("inner_group_num", default=1)) != 1:
        raise InputError.of("inner_group_num", inner, "only 1 is understood for ALBERT")
    count, groups = num_layers(fields), fields.size("num_hidden_groups", default=1)
    first = _layer(fields, mixer)
    at = [int(index / (count / groups)) for index in range(count)]  # the group of each layer, as the class numbers them
    pattern = tuple(int(index > 0 and at[index] == at[index - 1]) for index in range(count))
    kinds = (first, replace(first, kind="layer_again", reused=True))
    h, width = dim("h", hidden(fields)), dim("h_e", fields.size("embedding_size"))
    tables = (
        position_table(fields, width=width.size),
        Weight("token_type", (dim("T", fields.size("type_vocab_size", default=2)), width)),
    )
    project = Part("embedding_projection", linear("dense", "embedding_hidden_mapping_in", h, width, bias=True))
    fields.ignore("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
    stack = Stack(kinds if 1 in pattern else kinds[:1], pattern)
    return _encoder(fields, stack, tables, (project,), width)


def mpnet(fields: Fields) -> ModelSpec:
    """MPNet (arXiv 2004.09297): BERT with one table of relative positions for all layers, and no token types."""
    mixer = _mixer(fields, "qkvo", ("q", "k", "v", "o"))
    buckets = dim("B", fields.size("relative_attention_num_buckets", default=32))
    table = Weight("relative_bias", (buckets, dim("a", mixer.num_attention_heads)))
    other = (Part("relative_positions", (table,)),)
    return _encoder(fields, uniform(fields, _layer(fields, mixer)), (position_table(fields),), other)


def deberta(version: int) -> Callable[[Fields], ModelSpec]:
    """The reader of DeBERTa (arXiv 2006.03654), or of its second version (v2 and v3): relative positions instead of absolute ones."""

    def read(fields: Fields) -> ModelSpec:
        h = dim("h", hidden(fields))
        relative = fields.flag("relative_attention", default=False)
        joined = ("in_proj", "in_proj", "in_proj", "dense")
        extra = _relative_projections(fields, h, version) if relative else ()
        apart = ("query_proj", "key_proj", "value_proj", "dense")
        mixer = _mixer(
            fields, "qvo" if version == 1 else "qkvo", joined if version == 1 else apart, extra=extra
        )  # fmt: skip
        width = dim("h_e", fields.size("embedding_size")) if fields.has("embedding_size") else h
        tables: tuple[Weight, ...] = ()
        if fields.flag("position_biased_input", default=True):
            tables += (position_table(fields, width=width.size),)
        if types := fields.size("type_vocab_size", default=0, low=0):
            tables += (Weight("token_type", (dim("T", types), width)),)
        other = _relative_tables(fields, h, version) if relative else ()
        if width.size != h.size:
            other += (Part("embedding_projection", linear("dense", "embed_proj", h, width)),)
        if fields.has("conv_kernel_size") and (kernel := fields.size("conv_kernel_size", low=0, default=0)):
            other += (_convolution(fields, h, kernel),)
        fields.ignore("legacy", "pooler_dropout", "pooler_hidden_act", "pooler_hidden_size", "max_relative_positions")
        fields.ignore("conv_act", "attention_head_size", "pooling", "conv_groups", "hidden_act", "padding_idx")
        return _encoder(fields, uniform(fields, _layer(fields, mixer)), tables, other, width, h)

    return read


def _position_terms(fields: Fields) -> list[str]:
    """Which of "c2p" and "p2c" the scores have: written as a list, or joined by |."""
    found = fields.data.get("pos_att_type") or []
    fields.ignore("pos_att_type", "share_att_key", "talking_head", "norm_rel_ebd", "position_buckets")
    if fields.data.get("talking_head") is True:
        raise InputError.of("talking_head", True, "only false is understood for DeBERTa")
    if isinstance(found, str):
        found = found.split("|")
    if not isinstance(found, list) or not all(isinstance(term, str) for term in found):
        raise InputError.of("pos_att_type", found, "it must name c2p, p2c or both")
    return [term.strip().lower() for term in found]


def _relative_projections(fields: Fields, h: Dim, version: int) -> tuple[Weight, ...]:
    """The projections of relative positions in each layer; v3 shares those of the content."""
    terms = _position_terms(fields)
    if version == 2 and fields.data.get("share_att_key") is True:
        return ()
    names = ("pos_proj", "pos_q_proj") if version == 1 else ("pos_key_proj", "pos_query_proj")
    found: tuple[Weight, ...] = ()
    if "c2p" in terms:
        found += linear("position_key", names[0], h, h, bias=version == 2)
    if "p2c" in terms:
        found += linear("position_query", names[1], h, h, bias=True)
    return found


def _relative_tables(fields: Fields, h: Dim, version: int) -> tuple[Part, ...]:
    """The table of relative positions that all layers read, and its norm."""
    most = fields.data.get("max_relative_positions", -1)
    rows = most if type(most) is int and most > 0 else fields.size("max_position_embeddings")
    buckets = fields.data.get("position_buckets", -1)
    if version == 2 and type(buckets) is int and buckets > 0:
        rows = buckets
    if rows > 2**20:
        raise InputError.of("max_relative_positions", rows, "it must be at most 1,048,576")
    weights: tuple[Weight, ...] = (Weight("table", (dim("2", 2) * dim("s_r", rows), h)),)
    if version == 2 and "layer_norm" in str(fields.data.get("norm_rel_ebd", "none")).lower():
        weights += Norm("norm", h, **LAYER_NORM).weights
    return (Part("relative_positions", weights),)


def _convolution(fields: Fields, h: Dim, kernel: int) -> Part:
    """DeBERTa-v2's convolution next to the first layer."""
    groups = fields.size("conv_groups", default=1) if fields.has("conv_groups") else 1
    fields.divides("conv_groups", groups, "hidden_size", h.size)
    weight = Weight("convolution", (h, dim("h_g", h.size // groups) * dim("k", kernel)))
    return Part("convolution", (weight, Weight("convolution_bias", (h,)), *Norm("norm", h, **LAYER_NORM).weights))


def longformer(fields: Fields) -> ModelSpec:
    """Longformer (arXiv 2004.05150): RoBERTa with a second set of projections for tokens that see all."""
    h = dim("h", hidden(fields))
    extra = tuple(
        weight
        for name in ("query", "key", "value")
        for weight in linear(f"{name}_global", f"{name}_global", h, h, bias=True)
    )
    mixer = _mixer(fields, "qkvo", ("query", "key", "value", "dense"), extra=extra)
    types = Weight("token_type", (dim("T", fields.size("type_vocab_size", default=2)), h))
    fields.ignore("attention_window", "onnx_export", "attention_mode", "ignore_attention_mask", "sep_token_id")
    return _encoder(fields, uniform(fields, _layer(fields, mixer)), (position_table(fields), types))


def layoutlm(fields: Fields) -> ModelSpec:
    """LayoutLM (arXiv 1912.13318): BERT with four tables of places on the page."""
    spec = bert(Traits(pooler=True))(fields)
    rows, h = dim("s_2", fields.size("max_2d_position_embeddings", default=1024)), dim("h", spec.hidden_size)
    places = tuple(Weight(f"{side}_position", (rows, h)) for side in ("x", "y", "height", "width"))
    return replace(spec, embeddings=(*spec.embeddings, *places))


FAMILIES = {
    "DistilBertForMaskedLM": Family(distilbert, "distilbert"),
    "AlbertForMaskedLM": Family(albert, "albert"),
    "MPNetForMaskedLM": Family(mpnet, "mpnet"),
    "DebertaForMaskedLM": Family(deberta(1), "deberta"),
    "DebertaV2ForMaskedLM": Family(deberta(2), "deberta_v2"),
    "LongformerForMaskedLM": Family(longformer, "longformer"),
    "LayoutLMForMaskedLM": Family(layoutlm, "layoutlm"),
    "IBertForMaskedLM": Family(bert(Traits()), "ibert"),
}
