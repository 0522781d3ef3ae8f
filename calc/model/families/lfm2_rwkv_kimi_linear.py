"""Decoders whose state stays small: short convolutions (LFM2), gated recurrences (RecurrentGemma), linear attention (Kimi Linear,
MiniMax 1), RWKV, xLSTM."""

from __future__ import annotations

from collections.abc import Callable

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    LAYER_NORM,
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
    uniform,
    whole_heads,
)
from calc.model.families.qwen2_moe_glm_moe import Experts, first_dense, shared_expert
from calc.model.families.recurrent_mixers import kimi_delta, lightning, mlstm, rg_lru, rwkv_mixer, short_convolution
from calc.model.feed_forward import FeedForward
from calc.model.fields import Fields
from calc.model.mixers import Mixer
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Norm, Weight, dim, linear

_DROPOUT = {"attention": "attention_dropout"}
_GEMMA = {"style": "gemma"}
_LINEAR_OR_FULL = {"linear_attention": "linear", "full_attention": "full"}


def lfm2_width(fields: Fields) -> int:
    """The MLP's width: two thirds of the given one, scaled, rounded up to a multiple."""
    width = fields.size("block_ff_dim", "intermediate_size")
    multiple = fields.size("block_multiple_of", default=256)
    factor = fields.number("block_ffn_dim_multiplier", default=1.0, high=1e6)
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return width
    return multiple * -(-int(factor * int(2 * width / 3)) // multiple)


def lfm2(fields: Fields) -> ModelSpec:
    """LFM2: gated short convolutions, and attention in a few layers."""
    full = fields.items("full_attn_idxs")
    default = ["full" if full is None or at in full else "conv" for at in range(num_layers(fields))]
    kinds = layer_types(fields, {"full_attention": "full", "conv": "conv"}, default)
    taps = dim("K", fields.size("conv_L_cache", default=3))
    has_bias = fields.flag("conv_bias", default=False)
    mixers: dict[str, Callable[[], Mixer]] = {
        "full": lambda: attention(fields, "head", modules=("q_proj", "k_proj", "v_proj", "out_proj")),
        "conv": lambda: short_convolution(dim("h", hidden(fields)), taps, bias=has_bias),
    }
    forward = mlp(fields, width=lfm2_width(fields), activation="silu", modules=("w1", "w3", "w2"))
    layers = combined(mixers, kinds, {"dense": lambda: forward}, ["dense"] * len(kinds), norms(fields))
    if fields.has("tie_embedding"):
        tied = fields.flag("tie_embedding", default=True)
        if fields.flag("tie_word_embeddings", default=tied) != tied:
            raise InputError.of("tie_embedding", tied, "it must agree with tie_word_embeddings")
        return assemble(fields, layers, tied=tied)
    return assemble(fields, layers, tied=True)


def lfm2_moe(fields: Fields) -> ModelSpec:
    """LFM2 with experts in all but the first layers."""
    count = num_layers(fields)
    if not fields.has("layer_types"):
        raise InputError("layer_types: missing; it must name each layer, full_attention or conv", "layer_types")
    kinds = layer_types(fields, {"full_attention": "full", "conv": "conv"})
    taps = dim("K", fields.size("conv_L_cache", default=3))
    has_bias = fields.flag("conv_bias", default=False)
    first = fields.size("num_dense_layers", default=2, low=0)
    mixers: dict[str, Callable[[], Mixer]] = {
        "full": lambda: attention(fields, "head", modules=("q_proj", "k_proj", "v_proj", "out_proj")),
        "conv": lambda: short_convolution(dim("h", hidden(fields)), taps, bias=has_bias),
    }
    forwards: dict[str, Callable[[], FeedForward]] = {
        "dense": lambda: mlp(fields, activation="silu", modules=("w1", "w3", "w2")),
        "moe": lambda: moe(fields, activation="silu"),
    }
    pattern = ["dense" if at < first else "moe" for at in range(count)]
    layers = combined(mixers, kinds, forwards, pattern, norms(fields))
    fields.ignore("use_expert_bias", "intermediate_size")
    tied = fields.flag("tie_embedding", default=True) if fields.has("tie_embedding") else True
    return assemble(fields, layers, tied=tied)


def recurrent_gemma(fields: Fields) -> ModelSpec:
    """RecurrentGemma (Griffin, arXiv 2402.19427): two gated linear recurrences, then attention over a window."""
    count, kv, _ = heads(fields)
    head_dim = whole_heads(fields)[2]
    width = fields.size_or_none("lru_width") or hidden(fields)
    fields.divides("num_attention_heads", count, "lru_width", width)
    turn = fields.items("block_types") or ["recurrent", "recurrent", "attention"]
    if not {*map(str, turn)} <= {"recurrent", "attention"} or num_layers(fields) > 100 * len(turn):
        raise InputError.of("block_types", turn, "each must be 'recurrent' or 'attention', with at most 100 turns")
    kinds = [str(turn[at % len(turn)]) for at in range(num_layers(fields))]
    taps, h = dim("K", fields.size("conv1d_width", default=4)), dim("h", hidden(fields))
    window = fields.size("attention_window_size", "sliding_window", default=2048)
    mixers: dict[str, Callable[[], Mixer]] = {
        "attention": lambda: attention(
            fields, sizes=(count, kv, head_dim), bias="o" + bias(fields, letters="qkv"), window=window
        ),
        "recurrent": lambda: rg_lru(h, dim("r", width), dim("a", count), taps),
    }
    forward = mlp(fields, width=fields.size("intermediate_size") // 2, bias=True)
    layers = combined(mixers, kinds, {"dense": lambda: forward}, ["dense"] * len(kinds), norms(fields, **_GEMMA))
    fields.ignore("w_init_variance_scale", "final_w_init_variance_scale", "layers_block_type", "layer_types")
    return assemble(
        fields,
        layers,
        tied=True,
        final_norm=Norm("weight", h, style="gemma"),
        embedding_scale=True,
        logit_softcap=fields.number("logits_soft_cap", default=30.0) > 0,
        dropout=dropouts(fields, **_DROPOUT),
    )


def kimi_linear(fields: Fields) -> ModelSpec:
    """Kimi Linear (arXiv 2510.26692): delta attention whose decay is by channel, latent attention without rotation between."""
    section = fields.section("linear_attn_config") if fields.has("linear_attn_config") else fields
    h, count = dim("h", hidden(fields)), num_layers(fields)
    number = section.size("num_heads") if section is not fields else fields.size("linear_num_heads")
    size = section.size("head_dim") if section is not fields else fields.size("linear_head_dim")
    key = "linear_conv_kernel_dim" if section is fields else "short_conv_kernel_size"
    taps = dim("K", section.size(key, default=4))
    full = section.items("full_attn_layers") if section is not fields else None
    default = ["full" if (at + 1 in full if full else at and at % 4 == 0) else "linear" for at in range(count)]
    if section is not fields:
        section.ignore("kda_layers")
    kinds = layer_types(fields, _LINEAR_OR_FULL, default)
    mixers: dict[str, Callable[[], Mixer]] = {
        "full": lambda: latent_attention(fields),
        "linear": lambda: kimi_delta(h, dim("n", number), dim("d_k", size), taps),
    }
    experts = Experts(shared_count="num_shared_experts")
    forwards: dict[str, Callable[[], FeedForward]] = {
        "dense": lambda: mlp(fields),
        "moe": lambda: moe(fields, shared=shared_expert(fields, experts)),
    }
    layers = combined(mixers, kinds, forwards, first_dense(default=1)(fields), norms(fields))
    fields.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "moe_layer_freq")
    fields.ignore("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "intermediate_size")
    return assemble(fields, layers, never_tied=True, dropout=dropouts(fields, **_DROPOUT))


def minimax(fields: Fields) -> ModelSpec:
    """MiniMax-Text-01 (arXiv 2501.08313): lightning attention, softmax attention between, experts everywhere."""
    count, kv, head_dim = heads(fields)
    h = dim("h", hidden(fields))
    default = ["linear" if at % 2 else "full" for at in range(num_layers(fields))]
    kinds = layer_types(fields, _LINEAR_OR_FULL, default)
    window = fields.size_or_none("sliding_window") or 0
    mixers: dict[str, Callable[[], Mixer]] = {
        "full": lambda: attention(fields, sizes=(count, kv, head_dim), window=window),
        "linear": lambda: lightning(h, dim("a", count), dim("d", head_dim)),
    }
    forwards = {"moe": lambda: moe(fields, width=("intermediate_size",))}
    layers = combined(mixers, kinds, forwards, ["moe"] * len(kinds), norms(fields))
    fields.ignore(
        "block_size", *(f"{a}_{b}_factor" for a in ("full_attn", "linear_attn", "mlp") for b in ("alpha", "beta"))
    )
    return assemble(fields, layers, dropout=dropouts(fields, **_DROPOUT))


def rwkv(fields: Fields) -> ModelSpec:
    """RWKV 4 (arXiv 2305.13048): its MLP has a gate of its own and looks at the token before."""
    h = dim("h", hidden(fields))
    inner = dim("h_a", fields.size_or_none("attention_hidden_size") or h.size)
    extra = (
        *linear("receptance", "receptance", h, h),
        Weight("mix_key", (h,)),
        Weight("mix_receptance", (h,)),
    )
    forward = mlp(
        fields,
        width=fields.size_or_none("intermediate_size") or 4 * h.size,
        gated=False,
        activation="relu2",
        modules=("", "key", "value"),
        extra=extra,
    )
    layer = Layer("layer", rwkv_mixer(h, inner), forward, norms(fields, **LAYER_NORM))
    fields.ignore("rescale_every")
    return assemble(
        fields,
        uniform(fields, layer),
        embeddings=Norm("norm", h, **LAYER_NORM).weights,
        final_norm=Norm("weight", h, **LAYER_NORM),
    )


def xlstm(fields: Fields) -> ModelSpec:
    """xLSTM 7B (arXiv 2503.13427): a matrix memory for each head, with input and forget gates, and a gated MLP."""
    h, count = dim("h", hidden(fields)), fields.size("num_heads")
    if fields.size_or_none("embedding_dim") not in (None, h.size):
        raise InputError.of("embedding_dim", fields.data["embedding_dim"], f"it must be hidden_size ({h.size}) or null")
    if fields.size_or_none("num_blocks") not in (None, num_layers(fields)):
        raise InputError.of("num_blocks", fields.data["num_blocks"], "it must be num_hidden_layers or null")
    keys, values = (int(h.size * fields.number(f"{name}_dim_factor", default=1.0, high=64)) for name in ("qk", "v"))
    for name, size in (("qk_dim_factor", keys), ("v_dim_factor", values)):
        if not size or size % count or size % 64:
            raise InputError.of(name, size, f"times hidden_size it must be a multiple of 64 and of num_heads ({count})")
    multiple = fields.size("ffn_round_up_to_multiple_of", default=64)
    width = multiple * -(-int(h.size * fields.number("ffn_proj_factor", default=2.667, low=1e-3, high=64)) // multiple)
    has_bias, fused = fields.flag("use_bias", default=False), fields.text("weight_mode", default="single") == "fused"
    mixer = mlstm(
        h, dim("n", count), dim("d_k", keys // count), dim("d_v", values // count), bias=has_bias, fused=fused
    )
    names = ("proj_up_gate_z", "proj_up_gate_z", "proj_down") if fused else ("proj_up_gate", "proj_up", "proj_down")
    layer = Layer("layer", mixer, mlp(fields, width=width, bias=has_bias, modules=names), norms(fields, bias=has_bias))
    fields.ignore("norm_reduction_force_float32", "add_out_norm", "chunkwise_kernel", "sequence_kernel", "step_kernel")
    fields.ignore("mode", "chunk_size", "return_last_states", "autocast_kernel_dtype", "eps", "inference_state_dtype")
    fields.ignore("gate_soft_cap", "output_logit_soft_cap", "max_inference_chunksize")
    return assemble(fields, uniform(fields, layer), logit_softcap=True)


FAMILIES = {
    "KimiLinearForCausalLM": Family(kimi_linear, "kimi_linear"),
    "Lfm2ForCausalLM": Family(lfm2, "lfm2"),
    "Lfm2MoeForCausalLM": Family(lfm2_moe, "lfm2_moe"),
    "MiniMaxForCausalLM": Family(minimax, "minimax"),
    "RecurrentGemmaForCausalLM": Family(recurrent_gemma, "recurrent_gemma"),
    "RwkvForCausalLM": Family(rwkv, "rwkv"),
    "xLSTMForCausalLM": Family(xlstm, "xlstm"),
}
