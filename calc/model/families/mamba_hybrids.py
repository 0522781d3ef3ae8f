"""Decoders whose layers mix recurrences with attention: Qwen3-Next and 3.5, Nemotron-H, Jamba, Bamba, Granite 4, Mamba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from calc.errors import InputError
from calc.model.families import multi_token_prediction
from calc.model.families.base import Family
from calc.model.families.common import (
    assemble,
    attention,
    bias,
    combined,
    dropouts,
    hidden,
    layer_types,
    mlp,
    moe,
    norms,
    num_layers,
    patterned,
    uniform,
)
from calc.model.families.qwen2_moe_glm_moe import Experts, every_step, shared_expert
from calc.model.families.recurrent_mixers import gated_delta_net, mamba1, mamba2
from calc.model.feed_forward import MLP, FeedForward, MoE
from calc.model.fields import MOST_LAYERS, Fields
from calc.model.mixers import Attention, Mixer, Recurrence
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Norm, Part, dim, linear

_DROPOUT = {"attention": "attention_dropout"}
LINEAR_OR_FULL = {"linear_attention": "linear", "full_attention": "full", "sliding_attention": "sliding"}


def delta_net(fields: Fields, split: bool = True) -> Recurrence:
    """The gated delta net of Qwen3-Next and Qwen3.5."""
    keys = fields.size("linear_num_key_heads")
    values = fields.size("linear_num_value_heads")
    fields.divides("linear_num_key_heads", keys, "linear_num_value_heads", values)
    return gated_delta_net(
        dim("h", hidden(fields)),
        dim("n_k", keys),
        dim("n_v", values),
        dim("d_k", fields.size("linear_key_head_dim")),
        dim("d_v", fields.size("linear_value_head_dim")),
        dim("K", fields.size("linear_conv_kernel_dim")),
        split,
    )


def _delta_hybrid(
    fields: Fields,
    forwards: dict[str, Callable[[], FeedForward]],
    forward_pattern: list[str],
    split: bool = True,
    tied: bool = False,
    gated: bool = True,
    default: list[str] | None = None,
) -> ModelSpec:
    """Three delta nets, then one full attention with a gated output (unless `layer_types` says otherwise)."""
    every = fields.size("full_attention_interval") if fields.has("full_attention_interval") else 4
    default = default or ["linear" if (at + 1) % every else "full" for at in range(num_layers(fields))]
    letters = bias(fields)

    def softmax(width: int) -> Any:
        return attention(fields, "head", "gemma", bias=letters, gated=gated, window=width)

    mixers = {
        "linear": lambda: delta_net(fields, split),
        "full": lambda: softmax(0),
        "sliding": lambda: softmax(fields.size("sliding_window")),
    }
    fields.ignore("full_attention_interval", "attn_output_gate", "mamba_ssm_dtype")
    fields.ignore(
        "mtp_use_dedicated_embeddings", "head_dim", "intermediate_size", "mlp_only_layers", "decoder_sparse_step"
    )
    layers = combined(
        mixers, layer_types(fields, LINEAR_OR_FULL, default), forwards, forward_pattern, norms(fields, style="gemma")
    )
    spec = assemble(
        fields,
        layers,
        tied=tied,
        final_norm=Norm("weight", dim("h", hidden(fields)), style="gemma"),
        dropout=dropouts(fields, **_DROPOUT),
    )
    full = [layer for layer in layers if isinstance(layer.mixer, Attention)]
    return multi_token_prediction.with_prediction(
        spec, multi_token_prediction.count(fields, "mtp_num_hidden_layers"), full[-1] if full else None
    )


_QWEN_EXPERTS = Experts(shared_total="shared_expert_intermediate_size")


def _qwen_moe(fields: Fields, gate: bool = True) -> MoE:
    shared = shared_expert(fields, _QWEN_EXPERTS)
    return moe(fields, shared=shared, shared_gate=gate and shared is not None)


def qwen3_5(fields: Fields) -> ModelSpec:
    return _delta_hybrid(fields, {"dense": lambda: mlp(fields)}, ["dense"] * num_layers(fields))


def qwen3_5_moe(fields: Fields) -> ModelSpec:
    return _delta_hybrid(fields, {"moe": lambda: _qwen_moe(fields)}, ["moe"] * num_layers(fields))


def qwen3_next(fields: Fields) -> ModelSpec:
    forwards: dict[str, Callable[[], FeedForward]] = {"moe": lambda: _qwen_moe(fields), "dense": lambda: mlp(fields)}
    return _delta_hybrid(fields, forwards, every_step()(fields), split=False)


def lara_mini(fields: Fields) -> ModelSpec:
    """Delta nets, windows and full attention in turns of five, experts everywhere."""
    turn = ("linear", "sliding", "linear", "full", "sliding")
    count = num_layers(fields)
    return _delta_hybrid(
        fields,
        {"moe": lambda: _qwen_moe(fields, gate=False)},
        ["moe"] * count,
        tied=True,
        gated=False,
        default=[turn[at % 5] for at in range(count)],
    )


def mamba2_mixer(fields: Fields, *, prefix: str = "mamba_", inner: int | None = None, norm: bool = True) -> Recurrence:
    """Mamba 2 from the fields of Bamba and Granite: `mamba_n_heads`, `mamba_d_head` ("auto" divides the inner width)."""
    heads = fields.size(f"{prefix}n_heads")
    inner = inner or fields.size(f"{prefix}expand") * hidden(fields)
    fields.divides(f"{prefix}n_heads", heads, f"{prefix}expand x hidden_size", inner)
    if fields.data.get(f"{prefix}d_head", "auto") == "auto":
        fields.ignore(f"{prefix}d_head")
        size = inner // heads
    else:
        size = fields.size(f"{prefix}d_head")
    if size * heads != inner:
        raise InputError.of(f"{prefix}d_head", size, f"times {heads} heads it must be the inner width {inner}")
    fields.ignore(f"{prefix}chunk_size", "time_step_limit")
    return mamba2(
        dim("h", hidden(fields)),
        dim("n_m", heads),
        dim("p", size),
        dim("G", fields.size(f"{prefix}n_groups")),
        dim("N", fields.size(f"{prefix}d_state")),
        dim("K", fields.size(f"{prefix}d_conv")),
        bias=fields.flag(f"{prefix}proj_bias", default=False),
        conv_bias=fields.flag(f"{prefix}conv_bias", default=True),
        norm=norm,
    )


# Nemotron-H's letters (hybrid_override_pattern) and names of layers
_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON |= {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}
_NEMOTRON |= {"mlp": "mlp", "moe": "moe"}


def _nemotron_kinds(fields: Fields) -> list[str]:
    types = fields.items("layers_block_type", "layer_types")
    letters = fields.data.get("hybrid_override_pattern")
    fields.ignore("hybrid_override_pattern", "num_hidden_layers")
    found: list[Any] = types if types is not None else list(letters) if isinstance(letters, str) else []
    if not 1 <= len(found) <= MOST_LAYERS or not all(isinstance(kind, str) and kind in _NEMOTRON for kind in found):
        key = "hybrid_override_pattern" if types is None else "layers_block_type"
        value = letters if types is None else types
        raise InputError.of(key, value, "it must name each layer: M or mamba, * or attention, - or mlp, E or moe")
    return [_NEMOTRON[kind] for kind in found]


def _nemotron_mamba(fields: Fields) -> Recurrence:
    fields.ignore(
        "chunk_size", "expand", "use_mamba_kernels", "mamba_ssm_cache_dtype", "mamba_hidden_act", "mamba_proj_bias"
    )
    return mamba2(
        dim("h", hidden(fields)),
        dim("n_m", fields.size("mamba_num_heads")),
        dim("p", fields.size("mamba_head_dim")),
        dim("G", fields.size("n_groups", "mamba_n_groups")),
        dim("N", fields.size("ssm_state_size")),
        dim("K", fields.size("conv_kernel", "mamba_d_conv")),
        bias=fields.flag("use_bias", default=False),
        conv_bias=fields.flag("use_conv_bias", "mamba_conv_bias", default=True),
    )


def _nemotron_mlp(fields: Fields, width: int, letter: str = "f", inputs: int | None = None) -> MLP:
    activation = fields.text("mlp_hidden_act", default="relu2")
    modules = ("", "up_proj", "down_proj")
    has_bias = fields.flag("mlp_bias", default=False)
    return MLP(inputs or hidden(fields), width, False, has_bias, activation, modules, letter)


def _nemotron_moe(fields: Fields) -> MoE:
    """Plain experts, which may work in a narrower latent space between two projections."""
    latent = fields.size_or_none("moe_latent_size")
    plain = moe(fields, experts=("n_routed_experts", "num_local_experts"))
    expert = _nemotron_mlp(fields, fields.size("moe_intermediate_size"), "f_e", latent)
    shared = _nemotron_mlp(fields, fields.size("moe_shared_expert_intermediate_size"), "f_s")
    extra: tuple[Part, ...] = ()
    if latent:
        narrow, h, has_bias = dim("l", latent), dim("h", hidden(fields)), shared.bias
        down = linear("down", "fc1_latent_proj", narrow, h, bias=has_bias)
        extra = (Part("latent", (*down, *linear("up", "fc2_latent_proj", h, narrow, bias=has_bias))),)
    return MoE(
        plain.hidden_size, plain.num_experts, plain.num_experts_per_tok, expert, plain.router, shared, extra=extra
    )


def nemotron_h(fields: Fields) -> ModelSpec:
    """Nemotron-H and Nemotron 3: each layer is one norm and one part, a mixer or a feed-forward."""
    norm = norms(fields, "norm")
    window = fields.size_or_none("sliding_window") or 0
    kinds: dict[str, Callable[[], Layer]] = {
        "mamba": lambda: Layer("mamba", _nemotron_mamba(fields), None, norm),
        "attention": lambda: Layer("attention", attention(fields, rotary=False, window=window), None, norm),
        "mlp": lambda: Layer("mlp", None, _nemotron_mlp(fields, fields.size("intermediate_size")), norm),
        "moe": lambda: Layer("moe", None, _nemotron_moe(fields), norm),
    }
    layers = patterned(kinds, _nemotron_kinds(fields))
    predicting = _nemotron_prediction(fields)
    fields.ignore(
        "intermediate_size", "n_shared_experts", "moe_shared_expert_overlap", "num_logits_to_keep", "mlp_bias"
    )
    fields.ignore("attention_bias")  # the class has it and does not read it
    fields.ignore("residual_in_fp32", "rescale_prenorm_residual", "num_nextn_predict_layers", "mtp_layers_block_type")
    fields.ignore("mtp_hybrid_override_pattern", "time_step_limit", "time_step_floor", "time_step_max", "time_step_min")
    spec = assemble(fields, layers, never_tied=True, dropout=dropouts(fields, **_DROPOUT))
    return multi_token_prediction.with_blocks(spec, [kinds[kind]() for kind in predicting]) if predicting else spec


def _nemotron_prediction(fields: Fields) -> list[str]:
    """The kinds of layer in one step of multi-token prediction; none where the checkpoint holds none."""
    types, letters = fields.items("mtp_layers_block_type"), fields.data.get("mtp_hybrid_override_pattern")
    if not (steps := multi_token_prediction.count(fields)):
        return []
    found: list[Any] = types if types is not None else list(letters) if isinstance(letters, str) else []
    if steps != 1 or not found or not all(isinstance(kind, str) and kind in _NEMOTRON for kind in found):
        raise InputError.of(
            "num_nextn_predict_layers", steps, "only one, whose layers mtp_layers_block_type names, is understood"
        )
    return [_NEMOTRON[kind] for kind in found]


def bamba(fields: Fields) -> ModelSpec:
    indices = fields.items("attn_layer_indices") or []
    mixers: dict[str, Callable[[], Mixer]] = {
        "full": lambda: attention(fields, bias=bias(fields)),
        "mamba": lambda: mamba2_mixer(fields),
    }
    kinds = ["full" if at in indices else "mamba" for at in range(num_layers(fields))]
    forwards = {"dense": lambda: mlp(fields, bias=fields.flag("mlp_bias", default=False))}
    layers = combined(mixers, kinds, forwards, ["dense"] * len(kinds), norms(fields))
    fields.ignore("num_logits_to_keep", "z_loss_coefficient")
    return assemble(fields, layers, dropout=dropouts(fields, **_DROPOUT))


def granite_hybrid(fields: Fields) -> ModelSpec:
    """Granite 4: Mamba 2 and attention, experts (none in the dense models) next to a shared MLP."""
    kinds = layer_types(
        fields,
        {"linear_attention": "mamba", "mamba": "mamba", "full_attention": "full", "attention": "full"},
        ["mamba"] * num_layers(fields),
    )
    rotary = fields.data.get("position_embedding_type") == "rope"
    fields.ignore("position_embedding_type", "intermediate_size")
    mixers: dict[str, Callable[[], Mixer]] = {
        "full": lambda: attention(fields, bias=bias(fields), rotary=rotary),
        "mamba": lambda: mamba2_mixer(fields),
    }
    fused = ("input_linear", "input_linear", "output_linear")
    shared = mlp(fields, "shared_intermediate_size", letter="f_s", modules=fused)
    experts = fields.size("num_local_experts", default=8, low=0)
    forward: FeedForward = moe(fields, width=("intermediate_size",), shared=shared) if experts else shared
    layers = combined(mixers, kinds, {"moe": lambda: forward}, ["moe"] * len(kinds), norms(fields))
    return assemble(fields, layers, embedding_scale=True, head_scale=True, dropout=dropouts(fields, **_DROPOUT))


def jamba(fields: Fields) -> ModelSpec:
    """Jamba: Mamba with attention every eighth layer, and experts in every second."""
    count = num_layers(fields)
    period, offset = fields.size("attn_layer_period"), fields.size("attn_layer_offset", low=0)
    step, start = fields.size("expert_layer_period"), fields.size("expert_layer_offset", low=0)
    inner = fields.size("mamba_expand") * hidden(fields)
    auto = fields.data.get("mamba_dt_rank", "auto") == "auto"
    rank = -(-hidden(fields) // 16) if auto else fields.size("mamba_dt_rank")
    fields.ignore("mamba_dt_rank", "use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")
    mixers: dict[str, Callable[[], Mixer]] = {
        "full": lambda: attention(fields, rotary=False),
        "mamba": lambda: mamba1(
            dim("h", hidden(fields)),
            dim("i", inner),
            dim("N", fields.size("mamba_d_state")),
            dim("r", rank),
            dim("K", fields.size("mamba_d_conv")),
            bias=fields.flag("mamba_proj_bias", default=False),
            conv_bias=fields.flag("mamba_conv_bias", default=True),
            norms=True,
        ),
    }
    kinds = ["full" if at % period == offset else "mamba" for at in range(count)]
    experts = fields.size("num_experts") > 1
    pattern = ["moe" if experts and at % step == start else "dense" for at in range(count)]
    forwards: dict[str, Callable[[], FeedForward]] = {
        "moe": lambda: moe(fields, width=("intermediate_size",)),
        "dense": lambda: mlp(fields),
    }
    layers = combined(mixers, kinds, forwards, pattern, norms(fields))
    fields.ignore("num_experts_per_tok")
    return assemble(fields, layers, dropout=dropouts(fields, **_DROPOUT))


def mamba(fields: Fields) -> ModelSpec:
    """Mamba and Falcon-Mamba: nothing but mixers."""
    auto = fields.data.get("time_step_rank", "auto") == "auto"
    rank = -(-hidden(fields) // 16) if auto else fields.size("time_step_rank")
    mixer = mamba1(
        dim("h", hidden(fields)),
        dim("i", fields.size_or_none("intermediate_size") or fields.size("expand") * hidden(fields)),
        dim("N", fields.size("state_size")),
        dim("r", rank),
        dim("K", fields.size("conv_kernel")),
        bias=fields.flag("use_bias", default=False),
        conv_bias=fields.flag("use_conv_bias", default=True),
    )
    _ignore_mamba(fields)
    return assemble(fields, uniform(fields, Layer("layer", mixer, None, norms(fields, "norm"))), tied=True)


def mamba2_model(fields: Fields) -> ModelSpec:
    mixer = mamba2(
        dim("h", hidden(fields)),
        dim("n_m", fields.size("num_heads")),
        dim("p", fields.size("head_dim")),
        dim("G", fields.size("n_groups")),
        dim("N", fields.size("state_size")),
        dim("K", fields.size("conv_kernel")),
        bias=fields.flag("use_bias", default=False),
        conv_bias=fields.flag("use_conv_bias", default=True),
    )
    inner = fields.size("expand") * hidden(fields)
    if inner != fields.size("num_heads") * fields.size("head_dim"):
        raise InputError(f"num_heads x head_dim must be expand x hidden_size ({inner})", "num_heads")
    _ignore_mamba(fields)
    fields.ignore("chunk_size", "rms_norm", "norm_before_gate")
    return assemble(fields, uniform(fields, Layer("layer", mixer, None, norms(fields, "norm"))))


def _ignore_mamba(fields: Fields) -> None:
    fields.ignore("time_step_rank", "residual_in_fp32", "rescale_prenorm_residual", "expand", "hidden_act")
    fields.ignore("use_mambapy", "use_associative_scan", "use_falcon_mambapy", "mixer_rms_eps", "time_step_init_scheme")
    fields.ignore(
        "time_step_scale", "time_step_min", "time_step_max", "time_step_floor", "time_step_limit", "layer_types"
    )


FAMILIES = {
    "Qwen3_5ForCausalLM": Family(qwen3_5, "qwen3_5"),
    "Qwen3_5MoeForCausalLM": Family(qwen3_5_moe, "qwen3_5_moe"),
    "Qwen3NextForCausalLM": Family(qwen3_next, "qwen3_next"),
    "LaraMiniForCausalLM": Family(lara_mini, "lara_mini"),
    "NemotronHForCausalLM": Family(nemotron_h, "nemotron_h"),
    "BambaForCausalLM": Family(bamba, "bamba"),
    "GraniteMoeHybridForCausalLM": Family(granite_hybrid, "granitemoehybrid"),
    "JambaForCausalLM": Family(jamba, "jamba"),
    "MambaForCausalLM": Family(mamba, "mamba"),
    "FalconMambaForCausalLM": Family(mamba, "falcon_mamba"),
    "Mamba2ForCausalLM": Family(mamba2_model, "mamba2"),
}
