"""MiniMax-M3, whose published class name is not the one transformers gives its language model."""

from __future__ import annotations

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    assemble,
    attention,
    combined,
    dropouts,
    hidden,
    layer_types,
    mlp,
    moe,
    norms,
    num_layers,
)
from calc.model.fields import Fields
from calc.model.mixers import Attention, Indexer
from calc.model.spec import ModelSpec
from calc.model.weights import Norm, dim, linear


def minimax_m3(fields: Fields) -> ModelSpec:
    """MiniMax-M3's language model: grouped attention, an indexer that chooses blocks of keys in the sparse layers."""
    count = num_layers(fields)
    sparse_fields = fields.section("sparse_attention_config") if fields.has("sparse_attention_config") else None
    kinds = _m3_kinds(fields, sparse_fields, count)
    freq = fields.items("moe_layer_freq", length=count)
    types = fields.items("mlp_layer_types", length=count) or [
        "sparse" if flag else "dense" for flag in (freq or [1] * count)
    ]
    if not {*map(str, types)} <= {"sparse", "dense"}:
        raise InputError.of("mlp_layer_types", types, "each must be dense or sparse")

    def mixer(indexed: bool) -> Attention:
        chooser = _m3_indexer(fields, sparse_fields) if indexed else None
        return attention(fields, "head", "gemma", indexer=chooser)

    shared = mlp(
        fields,
        "shared_intermediate_size",
        letter="f_s",
        activation="swigluoai",
        modules=("gate_up_proj",) * 2 + ("down_proj",),
    )
    fused = ("gate_up_proj", "gate_up_proj", "down_proj")
    layers = combined(
        {"full": lambda: mixer(False), "sparse": lambda: mixer(True)},
        kinds,
        {
            "moe": lambda: moe(fields, width=("intermediate_size",), shared=shared, activation="swigluoai"),
            "dense": lambda: mlp(fields, "dense_intermediate_size", activation="swigluoai", modules=fused),
        },
        ["moe" if kind == "sparse" else "dense" for kind in types],
        norms(fields, style="gemma"),
    )
    fields.ignore("hidden_act", "first_k_dense_replace", "moe_intermediate_size", "n_shared_experts", "swiglu_alpha")
    fields.ignore("swiglu_limit", "use_gemma_norm", "use_qk_norm", "use_routing_bias", "qk_norm_type")
    told = fields.size("num_mtp_modules", default=0, low=0, high=64) if fields.has("num_mtp_modules") else 0
    fields.ignore("num_nextn_predict_layers", "dense_intermediate_size", "attention_output_gate")
    final = Norm("weight", dim("h", hidden(fields)), style="gemma")
    note = f"the config tells of {told} modules that predict further tokens; what its checkpoint holds of them is not known here"
    return assemble(
        fields,
        layers,
        final_norm=final,
        dropout=dropouts(fields, attention="attention_dropout"),
        notes=(f"{note}, and not counted",) if told else (),
    )


def _m3_kinds(fields: Fields, sparse_fields: Fields | None, count: int) -> list[str]:
    names = {"full_attention": "full", "minimax_m3_sparse": "sparse"}
    flags = sparse_fields.items("sparse_attention_freq", length=count) if sparse_fields else None
    default = ["sparse" if flag else "full" for flag in (flags or [0] * count)]
    return layer_types(fields, names, default)


def _m3_indexer(fields: Fields, sparse_fields: Fields | None) -> Indexer:
    """One small query head for each group of the main attention, one key, and a norm on each (transformers' class)."""

    def read(key: str, legacy: str) -> int:
        return sparse_fields.size(legacy) if sparse_fields and sparse_fields.has(legacy) else fields.size(key)

    count, size = read("index_n_heads", "sparse_num_index_heads"), read("index_head_dim", "sparse_index_dim")
    block = read("index_block_size", "sparse_block_size")
    h, width = dim("h", hidden(fields)), dim("d_i", size)
    weights = (
        *linear("query", "index_q_proj", dim("a_i", count) * width, h),
        *linear("key", "index_k_proj", width, h),
        *Norm("query_norm", width, style="gemma").weights,
        *Norm("key_norm", width, style="gemma").weights,
    )
    return Indexer(count, size, read("index_topk_blocks", "sparse_topk_blocks") * block, weights)


FAMILIES = {
    "MiniMaxM3ForCausalLM": Family(minimax_m3, "minimax_m3_vl"),
    "MiniMaxM3VLForCausalLM": Family(minimax_m3, "minimax_m3_vl"),
}
