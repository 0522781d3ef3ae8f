"""Mixtures of experts: Mixtral, Qwen MoE, gpt-oss, DBRX."""

from __future__ import annotations

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    FULL_OR_SLIDING,
    LAYER_NORM,
    assemble,
    attention,
    dropouts,
    hidden,
    layer_types,
    mlp,
    moe,
    norms,
    num_layers,
    patterned,
    uniform,
    window,
)
from calc.model.feed_forward import MoE, router
from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Norm, dim


def mixtral(fields: Fields) -> ModelSpec:
    mixer = attention(fields, window=fields.size_or_none("sliding_window") or 0)
    layer = Layer(
        "layer", mixer, moe(fields, ("num_local_experts", "num_experts"), ("intermediate_size",)), norms(fields)
    )
    return assemble(fields, uniform(fields, layer), dropout=dropouts(fields, attention="attention_dropout"))


def dense_or_moe(fields: Fields, dense: Layer, sparse: Layer, is_sparse: list[bool]) -> Stack:
    """Layers that differ in their feed-forward alone."""
    return patterned(
        {"dense": lambda: dense, "moe": lambda: sparse}, ["moe" if flag else "dense" for flag in is_sparse]
    )


def qwen3_moe(fields: Fields) -> ModelSpec:
    bias = "qkvo" if fields.flag("attention_bias", default=False) else ""
    mixer = attention(fields, "head", bias=bias, window=window(fields))
    fields.ignore("max_window_layers", "intermediate_size")
    step = fields.size("decoder_sparse_step", default=1)
    only = fields.items("mlp_only_layers") or []
    if not all(isinstance(at, int) for at in only):
        raise InputError.of(fields.name("mlp_only_layers"), only, "it must be a list of layer numbers")
    sparse = [at not in only and (at + 1) % step == 0 for at in range(num_layers(fields))]
    routed = Layer("moe", mixer, moe(fields, ("num_experts", "num_local_experts")), norms(fields))
    dense = Layer("dense", mixer, mlp(fields), norms(fields)) if not all(sparse) else routed
    return assemble(
        fields, dense_or_moe(fields, dense, routed, sparse), dropout=dropouts(fields, attention="attention_dropout")
    )


def gpt_oss(fields: Fields) -> ModelSpec:
    size = fields.size("sliding_window", default=128)

    def layer(kind: str, width: int) -> Layer:
        mixer = attention(
            fields, bias="qkvo" if fields.flag("attention_bias", default=True) else "", window=width, sinks=True
        )
        feed_forward = moe(
            fields, ("num_local_experts", "num_experts"), ("intermediate_size",), router_bias=True, bias=True
        )
        return Layer(kind, mixer, feed_forward, norms(fields, style="wide"))

    kinds = {"full": lambda: layer("full", 0), "sliding": lambda: layer("sliding", size)}
    default = ["full" if (at + 1) % 2 == 0 else "sliding" for at in range(num_layers(fields))]
    fields.ignore("experts_per_token", "initial_context_length", "swiglu_limit")
    layers = patterned(kinds, layer_types(fields, FULL_OR_SLIDING, default))
    final = Norm("weight", dim("h", hidden(fields)), style="wide")
    return assemble(fields, layers, final_norm=final, dropout=dropouts(fields, attention="attention_dropout"))


def dbrx(fields: Fields) -> ModelSpec:
    """DBRX: LayerNorms without bias, one projection for query, key and value; its sizes lie in two sections."""
    given, forward = fields.section("attn_config"), fields.section("ffn_config")
    count = fields.size("n_heads", "num_attention_heads")
    fields.divides("n_heads", count, "d_model", hidden(fields))
    kv = given.size("kv_n_heads")
    fields.divides("attn_config.kv_n_heads", kv, "n_heads", count)
    names = ("Wqkv", "Wqkv", "Wqkv", "out_proj")
    mixer = attention(fields, sizes=(count, kv, hidden(fields) // count), modules=names)
    experts, active = forward.size("moe_num_experts"), forward.size("moe_top_k")
    if active > experts:
        raise InputError.of("ffn_config.moe_top_k", active, f"it must be at most moe_num_experts ({experts})")
    modules, width = ("w1", "v1", "w2"), forward.size("ffn_hidden_size")
    expert = mlp(fields, width=width, letter="f_e", modules=modules, activation="silu")
    routed = MoE(hidden(fields), experts, active, expert, router(hidden(fields), experts, module="layer"))
    style = {**LAYER_NORM, "bias": False}
    layers = uniform(fields, Layer("layer", mixer, routed, norms(fields, **style)))
    given.ignore("clip_qkv", "attn_pdrop")
    forward.ignore("hidden_size", "ffn_act_fn", "moe_jitter_eps", "moe_loss_weight", "moe_normalize_expert_weights")
    forward.ignore("uniform_expert_assignment", "tie_word_embeddings")
    given.ignore("tie_word_embeddings")
    fields.ignore("num_key_value_heads")
    places = {"residual": "resid_pdrop", "embedding": "emb_pdrop"}
    final = Norm("weight", dim("h", hidden(fields)), **style)
    return assemble(fields, layers, never_tied=True, final_norm=final, dropout=dropouts(fields, **places))


FAMILIES = {
    "DbrxForCausalLM": Family(dbrx, "dbrx"),
    "MixtralForCausalLM": Family(mixtral, "mixtral"),
    "Qwen3MoeForCausalLM": Family(qwen3_moe, "qwen3_moe"),
    "GptOssForCausalLM": Family(gpt_oss, "gpt_oss"),
}
