"""BERT's kin with embeddings, adapters or positions of their own: RemBERT, RoCBert, X-MOD, XLM and XLNet."""

from __future__ import annotations

from dataclasses import replace

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
    norms,
    position_table,
    uniform,
)
from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Norm, Part, Split, Weight, dim, linear


def rembert(fields: Fields) -> ModelSpec:
    """RemBERT (arXiv 2010.12821): narrow tables at the input, and a wide head of its own."""
    if fields.flag("tie_word_embeddings", default=False):
        raise InputError.of("tie_word_embeddings", True, "the table and the head have different widths")
    h, vocab = dim("h", hidden(fields)), dim("V", fields.size("vocab_size"))
    narrow, wide = dim("h_e", fields.size("input_embedding_size")), dim("h_o", fields.size("output_embedding_size"))
    traits = Traits(width="input_embedding_size", transform=False, tied=False, extra_bias=False)
    spec = bert(traits)(fields)
    fields.ignore("classifier_dropout_prob")
    return replace(
        spec,
        head=linear("weight", "decoder", vocab, wide, Split.VOCAB, bias=True),
        other=(
            Part("embedding_projection", linear("dense", "embedding_hidden_mapping_in", h, narrow, bias=True)),
            Part(
                "head_transform",
                (*linear("dense", "dense", wide, h, bias=True), *Norm("norm", wide, **LAYER_NORM).weights),
            ),
        ),
    )


def roc_bert(fields: Fields) -> ModelSpec:
    """RoCBert: the pronunciation and the shape of a character, joined to it by a dense layer."""
    spec = bert(Traits())(fields)
    h, width = dim("h", hidden(fields)), hidden(fields)
    tables = []
    for name, letter in (("pronunciation", "p"), ("shape", "g")):
        size = fields.size(f"{name}_embed_dim")
        rows = dim(f"V_{letter}", fields.size(f"{name}_vocab_size"))
        tables.append(Weight(name, (rows, dim(f"h_{letter}", size))))
        width += size if fields.flag(f"enable_{name}", default=True) else 0
    joined = linear("join", "map_inputs_layer", h, dim("h_in", width), bias=True)
    other = (Part("embedding_join", joined),) if fields.flag("concat_input", default=True) else ()
    return replace(spec, embeddings=(*spec.embeddings, *tables), other=(*other, *spec.other))


def xmod(fields: Fields) -> ModelSpec:
    """X-MOD (arXiv 2205.06266): RoBERTa with an adapter for each language in every layer, of which a text uses one."""
    pre_norm = fields.flag("pre_norm", default=False)
    languages = fields.items("languages") or ["en_XX"]
    if len({*map(str, languages)}) != len(languages):
        raise InputError.of("languages", languages, "each must be named once")
    spec = bert(Traits(pre_norm=pre_norm))(fields)
    h = dim("h", hidden(fields))
    narrow = dim("r_a", max(1, hidden(fields) // fields.size("adapter_reduction_factor")))
    weights = (*linear("down", "dense1", narrow, h, bias=True), *linear("up", "dense2", h, narrow, bias=True))
    extra = [Part("adapters", weights, len(languages), 1)]
    if fields.flag("adapter_layer_norm", default=False):
        extra.append(Part("adapter_norm", Norm("norm", h, **LAYER_NORM).weights))
    fields.ignore("adapter_reuse_layer_norm", "ln_before_adapter", "default_language")
    (layer,) = spec.layers.kinds
    layers = Stack((replace(layer, extra=tuple(extra)),), spec.layers.pattern)
    return replace(spec, layers=layers, estimates=("each layer ends in the adapter of the text's language",))


def xlm(fields: Fields) -> ModelSpec:
    """XLM (arXiv 1901.07291): learned positions, a table of languages where there are several, norms after each half."""
    if fields.flag("asm", default=False):
        raise InputError.of("asm", True, "only false is understood: an adaptive softmax has tables of its own")
    h = dim("h", fields.size("emb_dim", "hidden_size"))
    count = fields.size("n_heads", "num_attention_heads")
    fields.divides("n_heads", count, "emb_dim", h.size)
    view = {"hidden_size": h.size, "num_hidden_layers": fields.size("n_layers", "num_hidden_layers")}
    fields.data = {**fields.data, **view}
    causal = fields.flag("causal", default=False)
    mixer = attention(
        fields,
        sizes=(count, count, h.size // count),
        bias="qkvo",
        modules=("q_lin", "k_lin", "v_lin", "out_lin"),
        rotary=False,
        causal=causal,
    )
    activation = "gelu" if fields.flag("gelu_activation", default=True) else "relu"
    names = ("", "lin1", "lin2")
    forward = mlp(fields, width=4 * h.size, gated=False, bias=True, activation=activation, modules=names)
    layer = Layer("layer", mixer, forward, norms(fields, "attention_norm", "output_norm", **LAYER_NORM))
    tables = [position_table(fields)]
    languages = fields.size("n_langs", default=1)
    if languages > 1 and fields.flag("use_lang_emb", default=True):
        tables.append(Weight("language", (dim("T", languages), h)))
    for key in ("embed_init_std", "init_std", "unk_index", "mask_index", "is_encoder", "start_n_top", "end_n_top"):
        fields.ignore(key)
    fields.ignore("summary_proj_to_labels", "lang_id", "bos_index", "eos_index", "pad_index", "sinusoidal_embeddings")
    fields.ignore("use_lang_emb", "lang2id", "id2lang", "n_words")
    return assemble(
        fields,
        uniform(fields, layer),
        tied=True,
        no_final_norm=True,
        embeddings=(*tables, *Norm("norm", h, **LAYER_NORM).weights),
        head_bias=True,
        dropout=dropouts(fields, attention="attention_dropout", residual="dropout", embedding="dropout"),
    )


def xlnet(fields: Fields) -> ModelSpec:
    """XLNet (arXiv 1906.08237): attention by relative positions, which have a projection and three biases of their own."""
    h = dim("h", fields.size("d_model", "hidden_size"))
    count = fields.size("n_head", "num_attention_heads")
    size = fields.size_or_none("d_head") or h.size // count
    if size * count != h.size:
        raise InputError.of("d_head", size, f"times n_head ({count}) it must be d_model ({h.size})")
    fields.data = {**fields.data, "num_hidden_layers": fields.size("n_layer", "num_hidden_layers")}
    a, d = dim("a", count), dim("d", size)
    extra = (
        Weight("position", (h, a, d)),  # multiplies the table of positions, once for all sequences
        *(Weight(f"{name}_bias", (a, d)) for name in ("position", "segment", "content")),
        Weight("segments", (dim("2", 2), a, d)),
    )
    plain = ("", "", "", "")  # tensors, no linear layers
    mixer = attention(fields, sizes=(count, count, size), modules=plain, rotary=False, causal=False, extra=extra)
    names = ("", "layer_1", "layer_2")
    forward = mlp(fields, width=fields.size("d_inner"), gated=False, bias=True, activation="gelu", modules=names)
    layer = Layer("layer", mixer, forward, norms(fields, "attention_norm", "output_norm", **LAYER_NORM))
    fields.ignore("ff_activation", "attn_type", "mem_len", "reuse_len", "use_mems_eval", "use_mems_train", "bi_data")
    fields.ignore("clamp_len", "same_length", "summary_last_dropout", "start_n_top", "end_n_top", "untie_r", "d_head")
    fields.ignore("n_token", "summary_use_proj")
    return assemble(
        fields,
        uniform(fields, layer),
        tied=True,
        no_final_norm=True,
        embeddings=(Weight("mask", (h,)),),
        head_bias=True,
        dropout=dropouts(fields, residual="dropout", embedding="dropout", attention="dropout"),
        estimates=("scores by relative positions are left out",),
    )


FAMILIES = {
    "RemBertForCausalLM": Family(rembert, "rembert"),
    "RoCBertForCausalLM": Family(roc_bert, "roc_bert"),
    "XmodForCausalLM": Family(xmod, "xmod"),
    "XLMWithLMHeadModel": Family(xlm, "xlm"),
    "XLNetLMHeadModel": Family(xlnet, "xlnet"),
}
