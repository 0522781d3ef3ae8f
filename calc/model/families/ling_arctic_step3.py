"""Decoders whose classes come with their checkpoints: Ling, DeepSeek-MoE, Arctic, TeleChat, MiniMax-Text-01 and Step 3.5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from calc.errors import InputError
from calc.model.families import multi_token_prediction
from calc.model.families.base import Family
from calc.model.families.common import (
    FULL_OR_SLIDING,
    assemble,
    attention,
    combined,
    heads,
    hidden,
    layer_types,
    mlp,
    moe,
    norms,
    num_layers,
    uniform,
)
from calc.model.families.deepseek_mla import deepseek
from calc.model.families.lfm2_rwkv_kimi_linear import minimax
from calc.model.families.qwen2_moe_glm_moe import Experts, first_dense, shared_expert
from calc.model.feed_forward import MLP, FeedForward
from calc.model.fields import Fields
from calc.model.mixers import Attention, Mixer
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Part, Split, Weight, dim, linear

_LING = Experts(shared_count="num_shared_experts")


def ling(fields: Fields) -> ModelSpec:
    """Ling and Ring, lite to 1T: grouped queries in one projection, the first layers dense, shared experts, norms of queries and keys."""
    if fields.has("use_bias") and fields.flag("use_bias", default=False):
        raise InputError.of("use_bias", True, "only false is understood for Ling")
    letters = "qkv" if fields.has("use_qkv_bias") and fields.flag("use_qkv_bias", default=False) else ""
    normed = "head" if fields.has("use_qk_norm") and fields.flag("use_qk_norm", default=False) else ""
    modules = ("query_key_value", "query_key_value", "query_key_value", "dense")
    mixers: dict[str, Callable[[], Mixer]] = {"full": lambda: attention(fields, normed, bias=letters, modules=modules)}
    count = num_layers(fields)
    forwards: dict[str, Callable[[], FeedForward]] = {
        "dense": lambda: mlp(fields),
        "moe": lambda: moe(fields, shared=_ling_shared(fields)),
    }
    layers = combined(mixers, ["full"] * count, forwards, first_dense()(fields), norms(fields))
    fields.ignore(
        "norm_head", "norm_softmax", "embedding_dropout", "output_dropout", "max_window_layers", "num_mtp_layers"
    )
    fields.ignore(
        "moe_router_enable_expert_bias", "routed_scaling_factor", "score_function", "using_split_qkv_in_self_attention"
    )
    fields.ignore("use_rmsnorm", "rotary_dim", "intermediate_size", "use_sliding_window", "mtp_loss_scaling_factor")
    spec = assemble(fields, layers)
    return multi_token_prediction.with_prediction(spec, multi_token_prediction.count(fields))


def _ling_shared(fields: Fields) -> MLP | None:
    if fields.has("moe_shared_expert_intermediate_size"):
        width = fields.size("moe_shared_expert_intermediate_size")
        count = fields.size("num_shared_experts", default=0, low=0, high=1024)
        return mlp(fields, width=width * count, letter="f_s") if count else None
    return shared_expert(fields, _LING)


def deepseek_moe(fields: Fields) -> ModelSpec:
    """DeepSeek-MoE 16B (arXiv 2401.06066): DeepSeek's experts under plain attention."""
    fields.data = {"use_mla": False, **fields.data}
    return deepseek(fields)


def arctic(fields: Fields) -> ModelSpec:
    """Snowflake Arctic: next to its experts each layer has a dense MLP as wide as the hidden size, with a norm of its own."""
    for key, wanted in (("moe_layer_frequency", 1), ("use_residual", True), ("parallel_attn_mlp_res", True)):
        if fields.has(key) and fields.data[key] != wanted:
            raise InputError.of(key, fields.data[key], f"only {wanted} is understood for Arctic")
        fields.ignore(key)
    dense = Part("residual_mlp", mlp(fields, width=hidden(fields), modules=("w1", "w3", "w2"), letter="h").weights)
    routed = moe(fields, width=("intermediate_size",), modules=("w1", "w3", "w2"))
    names = ("input_norm", "post_attention_norm", "residual_norm")
    fields.ignore("moe_eval_capacity_factor", "moe_min_capacity", "moe_token_dropping", "moe_train_capacity_factor")
    fields.ignore(
        "enable_expert_tensor_parallelism", "enc_index", "max_sequence_length", "quantization", "sliding_window"
    )
    return assemble(
        fields, uniform(fields, Layer("layer", attention(fields), routed, norms(fields, *names), extra=(dense,)))
    )


def telechat(fields: Fields) -> ModelSpec:
    """TeleChat and TeleChat2: one projection for keys and values, biases on what each half writes."""
    h = dim("h", hidden(fields))
    mixer = attention(fields, bias="o", modules=("query", "key_value", "key_value", "dense"))
    forward = mlp(fields, "ffn_hidden_size", "intermediate_size", extra=(Weight("down_bias", (h,)),))
    for key in ("apply_residual_connection_post_layernorm", "training_seqlen", "flash_attn", "base_seqlen", "logn"):
        fields.ignore(key)
    fields.ignore("embed_layernorm", "hidden_dropout", "unk_token_id", "seq_length", "layer_norm_epsilon")
    return assemble(fields, uniform(fields, Layer("layer", mixer, forward, norms(fields))))


def minimax_text(fields: Fields) -> ModelSpec:
    """MiniMax-Text-01 and M1 under their own names: `attn_type_list` has 0 for lightning and 1 for softmax attention."""
    types = fields.items("attn_type_list", length=num_layers(fields))
    if types is not None:
        if not all(type(kind) is int and kind in (0, 1) for kind in types):
            raise InputError.of("attn_type_list", types, "each must be 0 or 1")
        names = ("linear_attention", "full_attention")
        fields.data = {"layer_types": [names[kind] for kind in types], **fields.data}
    if fields.data.get("shared_intermediate_size"):
        raise InputError.of("shared_intermediate_size", fields.data["shared_intermediate_size"], "only 0 is understood")
    for key in ("shared_intermediate_size", "postnorm", "shared_moe_mode", "rotary_dim"):
        fields.ignore(key)
    ends = ("full_attention", "linear_attention", "mlp")
    fields.ignore(*(f"layernorm_{end}_{side}" for end in ends for side in ("alpha", "beta")))
    return minimax(fields)


def step3p5(fields: Fields) -> ModelSpec:
    """Step 3.5 and 3.7's text model: a gate for each head, norms of queries and keys, sigmoid experts with a shared one. Its checkpoint
    calls KV heads `num_attention_groups`, and names the layers with experts in a text, `moe_layers_enum`."""
    names = {"num_key_value_heads": "num_attention_groups", "num_experts_per_tok": "moe_top_k"}
    fields.data = {**{new: fields.data[old] for new, old in names.items() if fields.has(old)}, **fields.data}
    fields.ignore(*names.values(), "use_head_wise_attn_gate")
    query, kv, size = heads(fields)
    kinds = layer_types(_first_layers(fields), FULL_OR_SLIDING)
    other = fields.data.get("attention_other_setting")  # of the layers with a window, under its checkpoint's own name
    apart = Fields(other, "attention_other_setting") if isinstance(other, dict) else fields
    near = apart.size_or_none("num_attention_heads" if apart is not fields else "num_sliding_attention_heads") or query
    window = fields.size_or_none("sliding_window") or 0
    h = dim("h", hidden(fields))

    def mixer(number: int, width: int) -> Attention:
        gate = linear("gate", "g_proj", dim("a", number), h, Split.OUTPUT)
        return attention(fields, "head", sizes=(number, kv, size), window=width, extra=gate)

    forwards: dict[str, Callable[[], FeedForward]] = {
        "dense": lambda: mlp(fields),
        "moe": lambda: moe(
            fields,
            experts=("n_routed_experts", "num_experts", "moe_num_experts"),
            shared=mlp(fields, "share_expert_dim", letter="f_s"),
        ),
    }
    mixers: dict[str, Callable[[], Mixer]] = {
        "full": lambda: mixer(query, 0),
        "sliding": lambda: mixer(near, window),
    }
    layers = combined(mixers, kinds, forwards, _expert_layers(fields), norms(fields))
    fields.ignore(
        "sliding_window",
        "n_shared_experts",
        "use_moe_router_bias",
        "moe_router_scaling_factor",
        "attention_other_setting",
    )
    fields.ignore("intermediate_size", "num_sliding_attention_heads")
    spec = assemble(fields, layers)
    predicting = multi_token_prediction.count(fields)
    note = f"the config tells of {predicting} modules that predict further tokens; they are not counted"
    return replace(spec, notes=(*spec.notes, note)) if predicting else spec


def _first_layers(fields: Fields) -> Fields:
    """The lists that also name the layers of prediction, cut to the layers of the model."""
    given, count = fields.data.get("layer_types"), num_layers(fields)
    if isinstance(given, list) and len(given) > count:
        fields.data = {**fields.data, "layer_types": given[:count]}
    return fields


def _expert_layers(fields: Fields) -> list[str]:
    """Which layers have experts: those that `moe_layers_enum` names, else all but the first three."""
    named = fields.data.get("moe_layers_enum")
    if named is None:
        return first_dense(default=3)(fields)
    fields.ignore("moe_layers_enum")
    parts = named.split(",") if isinstance(named, str) and len(named) < 65536 else named
    if not isinstance(parts, list) or not all(str(part).strip().isdecimal() and len(str(part)) < 8 for part in parts):
        raise InputError.of("moe_layers_enum", named, "it must be layer numbers between commas")
    numbers = {int(part) for part in parts}
    return ["moe" if at in numbers else "dense" for at in range(num_layers(fields))]


_HUB = "https://huggingface.co/"
FAMILIES = {
    "BailingMoeForCausalLM": Family(ling, f"{_HUB}inclusionAI/Ling-lite/blob/main/modeling_bailing_moe.py"),
    "BailingMoeV2ForCausalLM": Family(ling, f"{_HUB}inclusionAI/Ling-mini-2.0/blob/main/modeling_bailing_moe_v2.py"),
    "DeepseekForCausalLM": Family(
        deepseek_moe, f"{_HUB}deepseek-ai/deepseek-moe-16b-base/blob/main/modeling_deepseek.py"
    ),
    "ArcticForCausalLM": Family(arctic, f"{_HUB}Snowflake/snowflake-arctic-base/blob/main/modeling_arctic.py"),
    "TelechatForCausalLM": Family(telechat, f"{_HUB}Tele-AI/telechat-7B/blob/main/modeling_telechat.py"),
    "TeleChat2ForCausalLM": Family(telechat, f"{_HUB}Tele-AI/TeleChat2-7B/blob/main/modeling_telechat2.py"),
    "MiniMaxText01ForCausalLM": Family(
        minimax_text, f"{_HUB}MiniMaxAI/MiniMax-Text-01/blob/main/modeling_minimax_text_01.py"
    ),
    "MiniMaxM1ForCausalLM": Family(minimax_text, f"{_HUB}MiniMaxAI/MiniMax-M1-80k/blob/main/modeling_minimax_m1.py"),
    "Step3p5ForCausalLM": Family(step3p5, "step3p7"),
}
