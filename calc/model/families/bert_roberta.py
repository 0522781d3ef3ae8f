"""Encoders and their language-model heads: BERT and those that differ from it in embeddings, norms or head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    LAYER_NORM,
    assemble,
    attention,
    dropouts,
    hidden,
    mlp,
    position_table,
    uniform,
    whole_heads,
)
from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Dim, Norm, Part, Weight, dim, linear

_DROPOUT = {
    "attention": "attention_probs_dropout_prob",
    "residual": "hidden_dropout_prob",
    "embedding": "hidden_dropout_prob",
}
_MODULES = ("query", "key", "value", "dense")


@dataclass(frozen=True, slots=True)
class Traits:
    """What sets an encoder apart from BERT. `pre_norm`: norms before each half and one at the end, none on the embedding."""

    token_types: bool = True
    positions: bool = True
    embedding_norm: bool = True
    pre_norm: bool = False
    pooler: bool = False
    head: bool = True
    transform: bool = True  # a dense layer and a norm between the last hidden state and the tied head
    tied: bool = True
    width: str = ""  # the field that gives the embedding its own width
    rotary: bool = False
    extra_bias: bool = True  # an untied head has two biases


def bert(traits: Traits) -> Callable[[Fields], ModelSpec]:
    """The reader of a BERT-like model with these traits."""

    def read(fields: Fields) -> ModelSpec:
        if fields.flag("add_cross_attention", default=False):
            raise InputError.of("add_cross_attention", True, "only false is understood for this class")
        kind = fields.data.get("position_embedding_type", "absolute")
        if kind not in ("absolute", None):
            raise InputError.of("position_embedding_type", kind, "only 'absolute' is understood")
        fields.ignore(
            "position_embedding_type", "classifier_dropout", "layer_norm_eps", "is_decoder", "rescale_embeddings"
        )
        h = dim("h", hidden(fields))
        causal = fields.flag("is_decoder", default=False)
        letters = "qkvo" if not fields.has("use_bias") or fields.flag("use_bias", default=True) else "o"  # BigBird
        sizes = whole_heads(fields)
        mixer = attention(fields, sizes=sizes, bias=letters, modules=_MODULES, causal=causal, rotary=traits.rotary)
        feed_forward = mlp(fields, gated=False, bias=True, modules=("", "dense", "dense"))
        names = ("input_norm", "post_attention_norm") if traits.pre_norm else ("attention_norm", "output_norm")
        layer = Layer("layer", mixer, feed_forward, tuple(Norm(name, h, **LAYER_NORM) for name in names))
        spec = assemble(
            fields,
            uniform(fields, layer),
            tied=traits.tied,
            embeddings=_embeddings(fields, traits),
            final_norm=Norm("weight", h, **LAYER_NORM),
            no_final_norm=not traits.pre_norm,
            head_bias=True,
            token=_width(fields, traits),
            other=_other(fields, traits),
            has_head=traits.head,
            dropout=dropouts(fields, **_DROPOUT),
        )
        return spec if traits.head else without_head(spec)

    return read


def without_head(spec: ModelSpec) -> ModelSpec:
    """The same model ending at its last hidden state."""
    return replace(spec, head=(), tied=False)


def _width(fields: Fields, traits: Traits) -> Dim:
    """The width of the embedding tables and of the head."""
    size = fields.size_or_none(traits.width) if traits.width else None
    return dim("h_e", size) if size else dim("h", hidden(fields))


def _embeddings(fields: Fields, traits: Traits) -> tuple[Weight, ...]:
    h = _width(fields, traits)
    found = []
    if traits.rotary:  # RoFormer keeps its table of sines, one head wide
        rows = dim("s_{max}", fields.size("max_position_embeddings"))
        found.append(Weight("position", (rows, dim("d", whole_heads(fields)[2]))))
    elif traits.positions:
        found.append(position_table(fields, width=h.size))
    if traits.token_types:
        found.append(Weight("token_type", (dim("T", fields.size("type_vocab_size", default=2)), h)))
    if fields.has("use_task_id") and fields.flag("use_task_id", default=False):  # ERNIE
        found.append(Weight("task_type", (dim("T_t", fields.size("task_type_vocab_size")), h)))
    fields.ignore("task_type_vocab_size", "use_task_id", "attention_type", "block_size", "num_random_blocks")
    if traits.embedding_norm:
        found += Norm("norm", h, **LAYER_NORM).weights
    return tuple(found)


def _other(fields: Fields, traits: Traits) -> tuple[Part, ...]:
    h, width = dim("h", hidden(fields)), _width(fields, traits)
    parts = []
    if width.size != h.size:
        parts.append(Part("embedding_projection", linear("dense", "embeddings_project", h, width, bias=True)))
    if traits.pooler:
        parts.append(Part("pooler", linear("dense", "dense", h, h, bias=True)))
    if traits.head and traits.transform:
        dense = linear("dense", "dense", width, h, bias=True)
        parts.append(Part("head_transform", (*dense, *Norm("norm", width, **LAYER_NORM).weights)))
    if traits.head and traits.extra_bias and not fields.flag("tie_word_embeddings", default=True):
        parts.append(
            Part("head_bias", (Weight("bias", (dim("V", fields.size("vocab_size")),)),))
        )  # besides the head's own
    return tuple(parts)


_MODEL = Traits(head=False, pooler=True)
_PRE_NORM = Traits(pre_norm=True, embedding_norm=False)

FAMILIES = {
    "BertModel": Family(bert(_MODEL), "bert"),
    "RobertaModel": Family(bert(_MODEL), "roberta"),
    "XLMRobertaModel": Family(bert(_MODEL), "xlm_roberta"),
    "BertLMHeadModel": Family(bert(Traits()), "bert"),
    "BertForMaskedLM": Family(bert(Traits()), "bert"),
    "RobertaForMaskedLM": Family(bert(Traits()), "roberta"),
    "RobertaForCausalLM": Family(bert(Traits()), "roberta"),
    "CamembertForCausalLM": Family(bert(Traits()), "camembert"),
    "XLMRobertaForCausalLM": Family(bert(Traits()), "xlm_roberta"),
    "Data2VecTextForCausalLM": Family(bert(Traits()), "data2vec"),
    "ElectraForCausalLM": Family(bert(Traits(width="embedding_size", extra_bias=False)), "electra"),
    "ErnieForCausalLM": Family(bert(Traits()), "ernie"),
    "BigBirdForCausalLM": Family(bert(Traits(pooler=True)), "big_bird"),
    "BertGenerationDecoder": Family(bert(Traits(token_types=False, transform=False)), "bert_generation"),
    "MegatronBertForCausalLM": Family(bert(_PRE_NORM), "megatron_bert"),
    "XLMRobertaXLForCausalLM": Family(bert(_PRE_NORM), "xlm_roberta_xl"),
    "RoFormerForCausalLM": Family(bert(Traits(width="embedding_size", rotary=True)), "roformer"),
    "RobertaPreLayerNormForCausalLM": Family(bert(Traits(pre_norm=True)), "roberta_prelayernorm"),
}
