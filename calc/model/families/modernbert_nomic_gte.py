"""Encoders that are served for embeddings and reranking: ModernBERT, Nomic BERT, Alibaba's GTE and Jina BERT."""

from __future__ import annotations

from collections.abc import Callable
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
from calc.model.feed_forward import MoE, router
from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Dim, Norm, Part, Weight, dim, linear

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
    h = dim("h", hidden(fields))
    letters = "qkvo" if fields.flag("qkv_proj_bias", default=False) else ""
    has_bias = fields.flag("mlp_fc1_bias", default=False)
    gated = str(fields.data.get("activation_function", "swiglu")).endswith("glu")
    width = fields.size_or_none("n_inner", "intermediate_size") or 4 * h.size
    mixer = attention(fields, sizes=whole_heads(fields), bias=letters, modules=_JOINED, causal=False)
    forward = mlp(fields, width=width, gated=gated, bias=has_bias, activation="silu", modules=("fc11", "fc12", "fc2"))
    around = norms(fields, "attention_norm", "output_norm", **LAYER_NORM)
    dense = Layer("dense" if fields.data.get("num_experts") else "layer", mixer, forward, around)
    layers = _with_experts(fields, dense, width) if fields.data.get("num_experts") else uniform(fields, dense)
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
            layers,
            embeddings=(*tables, *Norm("norm", h, **LAYER_NORM).weights),
            no_final_norm=True,
            has_head=False,
            dropout=dropouts(fields, attention="attn_pdrop", residual="resid_pdrop"),
        )
    )


def _with_experts(fields: Fields, dense: Layer, width: int) -> Stack:
    """Nomic Embed v2 (arXiv 2502.07972): experts in every so many layers, without a gate, with one bias that they share."""
    count, active = fields.size("num_experts", high=4096), fields.size("moe_top_k", default=2)
    if active > count:
        raise InputError.of("moe_top_k", active, f"it must be at most num_experts ({count})")
    if fields.data.get("num_shared_experts"):
        raise InputError.of("num_shared_experts", fields.data["num_shared_experts"], "only 0 is understood")
    every = fields.size("moe_every_n_layers", default=2)
    h = dense.norms[0].size
    expert = mlp(fields, width=width, gated=False, activation="gelu", modules=("", "w1", "w2"), letter="f_e")
    shared = Part("experts_bias", (Weight("bias", (h,)),))
    routed = MoE(h.size, count, active, expert, router(h.size, count, module="layer"), extra=(shared,))
    pattern = ["moe" if (at + 1) % every == 0 else "dense" for at in range(num_layers(fields))]
    moe = replace(dense, kind="moe", feed_forward=routed)
    return patterned({"dense": lambda: dense, "moe": lambda: moe}, pattern)


def jina_v3(fields: Fields) -> ModelSpec:
    """Jina embeddings v3 (arXiv 2409.10173): XLM-RoBERTa with rotary positions, a pooler, and an adapter for each task of every
    linear layer and table."""
    h = dim("h", hidden(fields))
    modules = ("Wqkv", "Wqkv", "Wqkv", "out_proj")
    mixer = attention(fields, sizes=whole_heads(fields), bias="qkvo", modules=modules, causal=False)
    forward = mlp(fields, gated=False, bias=True, modules=("", "fc1", "fc2"))
    rank = fields.size("lora_rank", default=4) if fields.has("lora_rank") else 4
    tasks = fields.data.get("lora_adaptations")
    number = len(tasks) if isinstance(tasks, list) else 0

    def adapters(name: str, *shapes: tuple[Dim, Dim]) -> tuple[Part, ...]:
        r = dim("r", rank)
        pairs = [
            weight
            for at, (out, inputs) in enumerate(shapes)
            for weight in (Weight(f"up_{at}", (out, r)), Weight(f"down_{at}", (r, inputs)))
        ]
        return (Part(name, tuple(pairs), number, min(number, 1)),) if number else ()

    f, three = dim("f", forward.intermediate_size), dim("3", 3)
    extra = adapters("task_adapters", (three * h, h), (h, h), (f, h), (h, f))
    layer = Layer("layer", mixer, forward, norms(fields, "attention_norm", "output_norm", **LAYER_NORM), extra=extra)
    types = dim("T", fields.size("type_vocab_size", default=1))
    outside = adapters("task_adapters", (h, dim("V", fields.size("vocab_size"))), (h, types), (h, h))
    for key in list(fields.data):
        if key.startswith(
            ("lora_", "use_flash", "load_trained", "truncate_dim", "matryoshka", "task_instr", "rotary_")
        ):
            fields.ignore(key)
    fields.ignore("position_embedding_type", "classifier_dropout", "layer_norm_eps", "emb_pooler", "use_reentrant")
    pooler = Part("pooler", linear("dense", "dense", h, h, bias=True))
    return without_head(
        assemble(
            fields,
            uniform(fields, layer),
            embeddings=(Weight("token_type", (types, h)), *Norm("norm", h, **LAYER_NORM).weights),
            no_final_norm=True,
            other=(pooler, *outside),
            has_head=False,
            dropout=dropouts(fields, **_DROPOUT),
        )
    )


def masked_lm(read: Callable[[Fields], ModelSpec]) -> Callable[[Fields], ModelSpec]:
    """The reader of such an encoder with a language-model head: a dense layer and a norm before the tied table."""

    def reader(fields: Fields) -> ModelSpec:
        spec, h = read(fields), dim("h", hidden(fields))
        dense = linear("dense", "dense", h, h, bias=True)
        head = Part("head_transform", (*dense, *Norm("norm", h, **LAYER_NORM).weights))
        vocab = dim("V", spec.vocab_size)
        other = (*(part for part in spec.other if part.name != "pooler"), head)
        return replace(spec, other=other, head=(Weight("bias", (vocab,)),), tied=True, has_head=True)

    return reader


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
    "NomicBertForMaskedLM": Family(masked_lm(nomic), "nomic_bert"),
    "NewModel": Family(gte, GTE),
    "NewForMaskedLM": Family(masked_lm(gte), GTE),
    "GteModel": Family(gte, GTE),
    "GteForMaskedLM": Family(masked_lm(gte), "gte"),
    "JinaEmbeddingsV3Model": Family(jina_v3, "jina_embeddings_v3"),
    "JinaEmbeddingsV3ForMaskedLM": Family(masked_lm(jina_v3), "jina_embeddings_v3"),
    "JinaBertModel": Family(jina, JINA),
    "JinaBertForMaskedLM": Family(jina, JINA),
}
