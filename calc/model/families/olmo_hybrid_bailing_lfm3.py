"""Decoders that mix attention with a state of fixed size, whose kinds of layers differ in more than the mixer: OLMo Hybrid, Bailing
(Ling and Ring), LFM3."""

from __future__ import annotations

from collections.abc import Callable

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    FULL_OR_SLIDING,
    assemble,
    attention,
    bias,
    combined,
    dropouts,
    heads,
    hidden,
    latent_attention,
    layer_types,
    mlp,
    moe,
    norms,
    num_layers,
    patterned,
)
from calc.model.families.mamba_hybrids import LINEAR_OR_FULL
from calc.model.families.qwen2_moe_glm_moe import Experts, first_dense, shared_expert
from calc.model.families.recurrent_mixers import gated_delta_net, kimi_delta, short_convolution
from calc.model.feed_forward import FeedForward
from calc.model.fields import Fields
from calc.model.mixers import Attention, Mixer
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Norm, Split, dim, linear

_DROPOUT = {"attention": "attention_dropout"}
_WIDE = {"style": "wide"}


def olmo_hybrid(fields: Fields) -> ModelSpec:
    """OLMo Hybrid: gated delta nets with norms before each half, and every fourth layer OLMo 3's attention with norms after."""
    h, count = hidden(fields), num_layers(fields)
    query, kv, size = heads(fields)
    keys = fields.size_or_none("linear_num_key_heads") or query
    values = fields.size_or_none("linear_num_value_heads") or query
    fields.divides("linear_num_key_heads", keys, "linear_num_value_heads", values)
    key = fields.size_or_none("linear_key_head_dim") or int(0.75 * h / keys)
    if not key:
        raise InputError.of("linear_key_head_dim", key, "it must be at least 1")
    value = fields.size_or_none("linear_value_head_dim") or 2 * key
    taps = fields.size("linear_conv_kernel_dim", default=4)
    rope = fields.data.get("rope_parameters")
    rotary = fields.has("rope_theta") or (isinstance(rope, dict) and rope.get("rope_theta") is not None)

    def linear_layer() -> Layer:
        sizes = (dim("n_k", keys), dim("n_v", values), dim("d_k", key), dim("d_v", value), dim("K", taps))
        mixer = gated_delta_net(dim("h", h), *sizes, apart=True)
        return Layer("linear", mixer, mlp(fields), norms(fields, **_WIDE))

    def full_layer() -> Layer:
        mixer = attention(fields, "full", "wide", (query, kv, size), bias=bias(fields), rotary=rotary)
        return Layer("full", mixer, mlp(fields), norms(fields, "post_attention_norm", "post_feedforward_norm", **_WIDE))

    default = ["full" if at % 4 == 3 else "linear" for at in range(count)]
    if "full" not in default:
        default[-1] = "full"
    kinds = {key: LINEAR_OR_FULL[key] for key in ("linear_attention", "full_attention")}
    layers = patterned({"linear": linear_layer, "full": full_layer}, layer_types(fields, kinds, default))
    fields.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
    fields.ignore("linear_allow_neg_eigval")
    return assemble(
        fields, layers, final_norm=Norm("weight", dim("h", h), style="wide"), dropout=dropouts(fields, **_DROPOUT)
    )


def bailing_hybrid(fields: Fields) -> ModelSpec:
    """Ling and Ring with Kimi's delta attention, whose gates are whole projections here, and every so many layers latent attention
    with an output gate for each head."""
    h, count = dim("h", hidden(fields)), num_layers(fields)
    every = fields.size("layer_group_size")
    default = ["full" if (at + 1) % every == 0 else "linear" for at in range(count)]
    kinds = layer_types(fields, {"linear_attention": "linear", "full_attention": "full"}, default)
    number = fields.size("linear_num_heads", "num_attention_heads")
    size = fields.size_or_none("linear_head_dim") or fields.size("head_dim")
    taps = dim("K", fields.size("linear_conv_kernel_dim", "short_conv_kernel_size"))
    gate = linear("gate", "g_proj", dim("a", fields.size("num_attention_heads")), h, Split.OUTPUT)
    mixers: dict[str, Callable[[], Mixer]] = {
        "full": lambda: latent_attention(fields, extra=gate),
        "linear": lambda: kimi_delta(h, dim("n", number), dim("d_k", size), taps, narrow=False),
    }
    experts = Experts(shared_count="n_shared_experts")
    forwards: dict[str, Callable[[], FeedForward]] = {
        "dense": lambda: mlp(fields),
        "moe": lambda: moe(fields, shared=shared_expert(fields, experts)),
    }
    layers = combined(mixers, kinds, forwards, first_dense(default=2)(fields), norms(fields))
    fields.ignore(
        "num_key_value_heads", "head_dim", "qk_head_dim", "kda_safe_gate", "kda_lower_bound", "linear_head_dim"
    )
    fields.ignore(
        "num_expert_group",
        "moe_renormalize",
        "mtp_loss_scaling_factor",
        "intermediate_size",
        "moe_layer_freq",
        "num_shared_experts",
    )
    notes: tuple[str, ...] = ()
    predicting = fields.size("num_mtp_layers", "num_nextn_predict_layers", default=0, low=0)
    if predicting:
        notes = (f"the checkpoint's {predicting} prediction layer(s) are not in the class and not counted",)
    return assemble(fields, layers, dropout=dropouts(fields, **_DROPOUT), notes=notes)


def lfm3(fields: Fields) -> ModelSpec:
    """LFM3: short convolutions, and attention with a gate for each head, over a window or over all tokens."""
    count = num_layers(fields)
    default = ["full" if at % 4 == 2 else "sliding" if at and at % 4 == 0 else "conv" for at in range(count)]
    kinds = layer_types(fields, FULL_OR_SLIDING | {"conv": "conv"}, default)
    query, _, _ = heads(fields)
    h, has_bias = dim("h", hidden(fields)), fields.flag("conv_bias", default=False)
    taps, letters = dim("K", fields.size("conv_L_cache")), bias(fields)
    gated = fields.flag("use_attention_gate", default=True)
    extra = linear("gate", "g_proj", dim("a", query), h, Split.OUTPUT) if gated else ()

    def softmax(width: int) -> Attention:
        return attention(fields, "head", bias=letters, window=width, extra=extra)

    mixers: dict[str, Callable[[], Mixer]] = {
        "full": lambda: softmax(0),
        "sliding": lambda: softmax(fields.size("sliding_window")),
        "conv": lambda: short_convolution(h, taps, bias=has_bias),
    }
    sandwich = ("input_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm")
    names = sandwich if fields.flag("use_sandwich_norm", default=True) else ("input_norm", "post_attention_norm")
    forward = mlp(fields, activation="silu", modules=("w1", "w3", "w2"))
    layers = combined(mixers, kinds, {"dense": lambda: forward}, ["dense"] * count, norms(fields, *names))
    fields.ignore("sliding_window")
    return assemble(fields, layers, tied=True, dropout=dropouts(fields, **_DROPOUT))


FAMILIES = {
    "OlmoHybridForCausalLM": Family(olmo_hybrid, "olmo_hybrid"),
    "BailingHybridForCausalLM": Family(bailing_hybrid, "bailing_hybrid"),
    "Lfm3ForCausalLM": Family(lfm3, "lfm3"),
}
