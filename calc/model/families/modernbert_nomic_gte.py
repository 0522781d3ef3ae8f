"""Encoders that are served for embeddings and reranking: ModernBERT, Nomic BERT, Alibaba's GTE and Jina BERT."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.bert_roberta import without_head
from calc.model.families.common import (
    FULL_OR_SLIDING,
    LAYER_NORM,
    assemble,
    attention,
    bias,
    dropouts,
    hidden,
    layer_types,
    mlp,
    norms,
    num_layers,
    patterned,
    uniform,
    whole_heads,
)
from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Norm, Part, Weight, dim, linear

_JOINED = ("Wqkv", "Wqkv", "Wqkv", "out_proj")
_DROPOUT = {"attention": "attention_probs_dropout_prob", "residual": "hidden_dropout_prob"}


def modernbert(fields: Fields) -> ModelSpec:
    """ModernBERT (arXiv 2412.13663): gated MLPs, windows on two layers of three, and no norm before the first attention."""
    every = fields.size("global_attn_every_n_layers", default=3) if fields.has("global_attn_every_n_layers") else 3
    count, local = num_layers(fields), fields.size("local_attention", default=128)
    kinds = layer_types(fields, FULL_OR_SLIDING, ["sliding" if at % every else "full" for at in range(count)])
    style = {**LAYER_NORM, "bias": fields.flag("norm_bias", default=False)}
    h, letters, has_bias = dim("h", hidden(fields)), bias(fields), fields.flag("mlp_bias", default=False)

    def layer(kind: str) -> Layer:
        names = ("post_attention_norm",) if kind.startswith("first_") else ("input_norm", "post_attention_norm")
        width = local if kind.endswith("sliding") else 0
        modules = ("Wqkv", "Wqkv", "Wqkv", "Wo")
        mixer = attention(fields, sizes=whole_heads(fields), bias=letters, window=width, modules=modules, causal=False)
        return Layer(
            kind, mixer, mlp(fields, bias=has_bias, modules=("Wi", "Wi", "Wo")), norms(fields, *names, **style)
        )

    kinds = [f"first_{kinds[0]}", *kinds[1:]]
    dense_head = linear("dense", "dense", h, h, bias=fields.flag("classifier_bias", default=False))
    head = Part("prediction_head", (*dense_head, *Norm("norm", h, **style).weights))
    for key in (
        "global_rope_theta",
        "local_rope_theta",
        "initializer_cutoff_factor",
        "classifier_activation",
        "position_embedding_type",
    ):
        fields.ignore(key)
    fields.ignore(
        "classifier_dropout",
        "classifier_pooling",
        "deterministic_flash_attn",
        "sparse_prediction",
        "repad_logits_with_grad",
    )
    fields.ignore(
        "sparse_pred_ignore_index", "reference_compile", "embedding_dropout", "sliding_window", "gradient_checkpointing"
    )
    fields.ignore("tie_word_embeddings", "layer_norm_eps")
    return assemble(
        fields,
        patterned({kind: partial(layer, kind) for kind in set(kinds)}, kinds),
        tied=True,
        embeddings=Norm("norm", h, **style).weights,
        final_norm=Norm("weight", h, **style),
        head_bias=fields.flag("decoder_bias", default=True),
        other=(head,),
        dropout=dropouts(fields, attention="attention_dropout", residual="mlp_dropout"),
    )


def nomic(fields: Fields) -> ModelSpec:
    """Nomic BERT (arXiv 2402.01613): BERT with rotary positions, gated MLPs and no biases but the norms'."""
    if fields.data.get("num_experts"):
        raise InputError.of(
            "num_experts", fields.data["num_experts"], "only a model without experts is understood for Nomic BERT"
        )
    h = dim("h", hidden(fields))
    letters = "qkvo" if fields.flag("qkv_proj_bias", default=False) else ""
    has_bias = fields.flag("mlp_fc1_bias", default=False)
    gated = str(fields.data.get("activation_function", "swiglu")).endswith("glu")
    width = fields.size_or_none("n_inner", "intermediate_size") or 4 * h.size
    mixer = attention(fields, sizes=whole_heads(fields), bias=letters, modules=_JOINED, causal=False)
    forward = mlp(fields, width=width, gated=gated, bias=has_bias, activation="silu", modules=("fc11", "fc12", "fc2"))
    layer = Layer("layer", mixer, forward, norms(fields, "attention_norm", "output_norm", **LAYER_NORM))
    types = fields.size("type_vocab_size", default=2, low=0)
    tables = (Weight("token_type", (dim("T", types), h)),) if types else ()
    for key in list(fields.data):
        if key.startswith(
            (
                "rotary_",
                "use_",
                "mlp_",
                "fused_",
                "pad_",
                "causal",
                "parallel_",
                "prenorm",
                "summary_",
                "layer_norm",
                "dense_seq",
                "scale_attn",
                "reorder",
                "last_layer",
                "max_trained",
                "activation_function",
                "ffn_div",
                "expert_",
                "moe_",
                "num_shared",
                "router_",
            )
        ):
            fields.ignore(key)
    return without_head(
        assemble(
            fields,
            uniform(fields, layer),
            embeddings=(*tables, *Norm("norm", h, **LAYER_NORM).weights),
            no_final_norm=True,
            has_head=False,
            dropout=dropouts(fields, attention="attn_pdrop", residual="resid_pdrop"),
        )
    )


def gte(fields: Fields) -> ModelSpec:
    """GTE v1.5 and multilingual (arXiv 2407.19669, "NewModel"): BERT with rotary positions and gated MLPs."""
    h = dim("h", hidden(fields))
    modules = ("qkv_proj", "qkv_proj", "qkv_proj", "o_proj")
    mixer = attention(fields, sizes=whole_heads(fields), bias="qkvo", modules=modules, causal=False)
    down = Weight("down_bias", (h,))
    forward = mlp(fields, modules=("up_gate_proj", "up_gate_proj", "down_proj"), extra=(down,))
    layer = Layer("layer", mixer, forward, norms(fields, "attention_norm", "output_norm", **LAYER_NORM))
    types = fields.size("type_vocab_size", default=0, low=0) if fields.has("type_vocab_size") else 0
    tables = (Weight("token_type", (dim("T", types), h)),) if types else ()
    fields.ignore(
        "pack_qkv", "unpad_inputs", "use_memory_efficient_attention", "logn_attention_scale", "logn_attention_clip1"
    )
    fields.ignore("position_embedding_type", "layer_norm_type", "classifier_dropout", "add_pooling_layer")
    return without_head(
        assemble(
            fields,
            uniform(fields, layer),
            embeddings=(*tables, *Norm("norm", h, **LAYER_NORM).weights),
            no_final_norm=True,
            has_head=False,
            dropout=dropouts(fields, **_DROPOUT),
        )
    )


def jina(fields: Fields) -> ModelSpec:
    """Jina embeddings v2 (arXiv 2310.19923): BERT with ALiBi and gated MLPs, and a pooler."""
    h = dim("h", hidden(fields))
    names = ("query", "key", "value", "dense")
    mixer = attention(fields, sizes=whole_heads(fields), bias="qkvo", modules=names, causal=False, rotary=False)
    forward = mlp(fields, modules=("gated_layers", "gated_layers", "wo"), extra=(Weight("down_bias", (h,)),))
    layer = Layer("layer", mixer, forward, norms(fields, "attention_norm", "output_norm", **LAYER_NORM))
    types = Weight("token_type", (dim("T", fields.size("type_vocab_size", default=2)), h))
    if fields.data.get("feed_forward_type", "original") not in ("geglu", "reglu"):
        raise InputError.of(
            "feed_forward_type", fields.data.get("feed_forward_type"), "only geglu and reglu are understood"
        )
    fields.ignore(
        "position_embedding_type", "feed_forward_type", "emb_pooler", "classifier_dropout", "attn_implementation"
    )
    spec = assemble(
        fields,
        uniform(fields, layer),
        embeddings=(types, *Norm("norm", h, **LAYER_NORM).weights),
        no_final_norm=True,
        other=(Part("pooler", linear("dense", "dense", h, h, bias=True)),),
        dropout=dropouts(fields, **_DROPOUT),
    )
    return replace(spec, head=(), tied=False, has_head=False)


_HUB = "https://huggingface.co/"
NOMIC = f"{_HUB}nomic-ai/nomic-bert-2048/blob/main/modeling_hf_nomic_bert.py"
GTE = f"{_HUB}Alibaba-NLP/new-impl/blob/main/modeling.py"
JINA = f"{_HUB}jinaai/jina-bert-implementation/blob/main/modeling_bert.py"

FAMILIES = {
    "ModernBertForMaskedLM": Family(modernbert, "modernbert"),
    "NomicBertModel": Family(nomic, NOMIC),
    "NewModel": Family(gte, GTE),
    "GteModel": Family(gte, GTE),
    "JinaBertModel": Family(jina, JINA),
    "JinaBertForMaskedLM": Family(jina, JINA),
}
