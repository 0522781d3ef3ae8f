"""Decoders with two mixers in a layer: Zamba and Zamba 2, whose attention blocks are shared between layers, and Falcon-H1."""

from __future__ import annotations

from dataclasses import replace

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    assemble,
    attention,
    bias,
    dropouts,
    hidden,
    mlp,
    norms,
    num_layers,
    uniform,
)
from calc.model.families.recurrent_mixers import mamba1, mamba2
from calc.model.feed_forward import MLP
from calc.model.fields import Fields
from calc.model.mixers import Attention, Recurrence
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Norm, Part, dim, linear

_DROPOUT = {"attention": "attention_dropout"}
_KINDS = {"linear_attention": "mamba", "mamba": "mamba", "hybrid": "hybrid"}


def _kinds(fields: Fields, default: list[str]) -> list[str]:
    """The kind of each layer: "mamba", or "hybrid" where a shared block stands before it."""
    found = fields.items("layers_block_type", "layer_types", length=num_layers(fields))
    if found is None:
        if len(default) != num_layers(fields):
            raise InputError(
                "layers_block_type: missing; it must name each layer, mamba or hybrid", "layers_block_type"
            )
        return default
    if not all(isinstance(kind, str) and kind in _KINDS for kind in found):
        raise InputError.of("layers_block_type", found, f"each must be one of {', '.join(_KINDS)}")
    return [_KINDS[kind] for kind in found]


def _block(fields: Fields, rotary: bool) -> Attention:
    """Attention of a shared block: it reads the hidden state and the embedding side by side, 2 h wide."""
    h = hidden(fields)
    count = fields.size("num_attention_heads")
    kv = fields.size_or_none("num_key_value_heads") or count
    fields.divides("num_key_value_heads", kv, "num_attention_heads", count)
    fields.divides("num_attention_heads", count, "2 x hidden_size", 2 * h)
    size = fields.size_or_none("attention_head_dim", "head_dim") or 2 * h // count
    inputs = fields.size_or_none("attention_hidden_size") or 2 * h
    if inputs != 2 * h:
        raise InputError.of("attention_hidden_size", inputs, f"it must be 2 x hidden_size ({2 * h}) or null")
    return attention(fields, sizes=(count, kv, size), inputs=inputs, rotary=rotary)


def _stack(
    fields: Fields, kinds: list[str], mamba: Recurrence, block: Layer, blocks: int, each: tuple[Part, ...]
) -> Stack:
    """Mamba layers, of which the hybrid ones run a block first: the first `blocks` of them hold one each, the later ones take
    them in turn. `each`: what every hybrid layer adds of its own."""
    h = dim("h", hidden(fields))
    own = Part("mamba_norm", Norm("input_norm", h).weights)
    down = Part("linear", linear("linear", "linear", h, h))
    holder = replace(block, kind="hybrid", second=mamba, extra=(down, own, *each))
    layers = (
        Layer("mamba", mamba, None, norms(fields, "norm")),
        holder,
        replace(holder, kind="hybrid_again", reused=True),
    )
    seen, pattern = 0, []
    for kind in kinds:
        pattern.append(0 if kind == "mamba" else 1 if seen < blocks else 2)
        seen += kind == "hybrid"
    present = sorted(set(pattern))
    return Stack(tuple(layers[at] for at in present), tuple(present.index(at) for at in pattern))


def _block_norms(fields: Fields) -> tuple[Norm, ...]:
    h = dim("h", hidden(fields))
    return (Norm("input_norm", dim("2", 2) * h), Norm("post_attention_norm", h))


def _ignore(fields: Fields) -> None:
    fields.ignore("time_step_min", "time_step_max", "time_step_floor", "time_step_limit", "num_logits_to_keep")
    fields.ignore(
        "use_mamba_kernels", "chunk_size", "hidden_mamba_act", "head_dim", "attention_head_dim", "layer_types"
    )
    fields.ignore(
        "hidden_act", "attention_hidden_size", "use_associative_scan", "attn_layer_period", "attn_layer_offset"
    )


def zamba(fields: Fields) -> ModelSpec:
    """Zamba (arXiv 2405.16712): one block of attention and MLP serves every hybrid layer."""
    count = num_layers(fields)
    period, offset = fields.size("attn_layer_period"), fields.size("attn_layer_offset", low=0)
    default = ["mamba", "mamba", "hybrid", *("hybrid" if at % period == offset else "mamba" for at in range(count - 3))]
    inner = fields.size("mamba_expand") * hidden(fields)
    fields.divides("n_mamba_heads", fields.size("n_mamba_heads"), "mamba_expand x hidden_size", inner)
    auto = fields.data.get("mamba_dt_rank", "auto") == "auto"
    fields.ignore("mamba_dt_rank")
    mamba = mamba1(
        dim("h", hidden(fields)),
        dim("i", inner),
        dim("N", fields.size("mamba_d_state")),
        dim("r", -(-hidden(fields) // 16) if auto else fields.size("mamba_dt_rank")),
        dim("K", fields.size("mamba_d_conv")),
        bias=fields.flag("mamba_proj_bias", default=False),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        stacked=True,
    )
    block = Layer("hybrid", _block(fields, rotary=False), mlp(fields, activation="gelu"), _block_norms(fields))
    layers = _stack(fields, _kinds(fields, default), mamba, block, 1, ())
    _ignore(fields)
    return assemble(fields, layers, tied=True, dropout=dropouts(fields, **_DROPOUT))


def _adapters(fields: Fields, forward: MLP) -> tuple[Part, ...]:
    """What each use of a block adds to its projections: a narrow pair on the MLP's, and on the attention's where asked for."""
    h, f, rank = (
        dim("h", forward.hidden_size),
        dim("f", forward.intermediate_size),
        dim("r_a", fields.size("adapter_rank")),
    )
    both, wide = dim("2", 2) * f, dim("2", 2) * h
    pairs = {"gate_up": (h, both)}
    if fields.flag("use_shared_attention_adapter", default=False):
        pairs |= dict.fromkeys(("query", "key", "value"), (wide, wide))
    weights = tuple(
        weight
        for name, (inputs, output) in pairs.items()
        for weight in (
            *linear(f"{name}_down", f"{name}_adapter.0", rank, inputs),
            *linear(f"{name}_up", f"{name}_adapter.1", output, rank),
        )
    )
    return (Part("block_adapters", weights),)


def zamba2(fields: Fields) -> ModelSpec:
    """Zamba 2 (arXiv 2411.15242): Mamba 2, several blocks in turn, and adapters of its own for each use of one."""
    h = hidden(fields)
    default = ["mamba"] + (["mamba"] * 5 + ["hybrid"]) * 7
    default += ["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3 + ["hybrid"] + ["mamba"] * 2
    count, inner = fields.size("n_mamba_heads"), fields.size("mamba_expand") * h
    fields.divides("n_mamba_heads", count, "mamba_expand x hidden_size", inner)
    groups = fields.size("mamba_ngroups")
    fields.divides("mamba_ngroups", groups, "mamba_expand x hidden_size", inner)
    has_bias = fields.flag("add_bias_linear", default=False)
    mamba = mamba2(
        dim("h", h),
        dim("n_m", count),
        dim("p", inner // count),
        dim("G", groups),
        dim("N", fields.size("mamba_d_state")),
        dim("K", fields.size("mamba_d_conv")),
        bias=has_bias,
        conv_bias=True,
    )
    names = ("gate_up_proj", "gate_up_proj", "down_proj")
    width = fields.size_or_none("intermediate_size") or 4 * h
    forward = mlp(fields, width=width, bias=has_bias, activation="gelu", modules=names)
    rotary = fields.flag("use_mem_rope", default=False)
    block = Layer("hybrid", _block(fields, rotary), forward, _block_norms(fields))
    blocks = fields.size("num_mem_blocks")
    layers = _stack(fields, _kinds(fields, default), mamba, block, blocks, _adapters(fields, forward))
    _ignore(fields)
    fields.ignore(
        "mamba_headdim", "use_conv_bias", "use_mem_eff_path", "use_long_context", "kv_channels", "ffn_hidden_size"
    )
    fields.ignore("num_query_groups", "hybrid_layer_ids", "intermediate_size", "adapter_rank")
    return assemble(fields, layers, tied=True, dropout=dropouts(fields, **_DROPOUT))


def falcon_h1(fields: Fields) -> ModelSpec:
    """Falcon-H1: in every layer attention and Mamba 2 read the same input side by side."""
    h = hidden(fields)
    inner = fields.size_or_none("mamba_d_ssm") or fields.size("mamba_expand") * h
    count = fields.size("mamba_n_heads")
    fields.divides("mamba_n_heads", count, "mamba_d_ssm", inner)
    size = inner // count
    if fields.data.get("mamba_d_head", "auto") != "auto" and fields.size("mamba_d_head") != size:
        rule = f"times mamba_n_heads ({count}) it must be the inner width {inner}"
        raise InputError.of("mamba_d_head", fields.data["mamba_d_head"], rule)
    mamba = mamba2(
        dim("h", h),
        dim("n_m", count),
        dim("p", size),
        dim("G", fields.size("mamba_n_groups")),
        dim("N", fields.size("mamba_d_state")),
        dim("K", fields.size("mamba_d_conv")),
        bias=fields.flag("mamba_proj_bias", default=False),
        output_bias=fields.flag("projectors_bias", default=False),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        norm=fields.flag("mamba_rms_norm", default=False),
    )
    forward = mlp(fields, bias=fields.flag("mlp_bias", default=False))
    layer = Layer("layer", attention(fields, bias=bias(fields)), forward, norms(fields), second=mamba)
    fields.ignore("mamba_d_head", "mamba_d_ssm", "mamba_expand", "mamba_chunk_size", "mamba_norm_before_gate")
    fields.ignore("layers_block_type", "layer_types", "num_logits_to_keep", "time_step_limit")
    fields.ignore(*(f"{name}_multiplier" for name in ("lm_head", "embedding", "key", "attention_out", "attention_in")))
    fields.ignore("ssm_in_multiplier", "ssm_out_multiplier", "mlp_multipliers", "ssm_multipliers")
    return assemble(
        fields,
        uniform(fields, layer),
        embedding_scale=True,
        head_scale=True,
        dropout=dropouts(fields, **_DROPOUT),
        estimates=("attention and Mamba are counted one after another, and the multipliers' copies are left out",),
    )


FAMILIES = {
    "ZambaForCausalLM": Family(zamba, "zamba"),
    "Zamba2ForCausalLM": Family(zamba2, "zamba2"),
    "FalconH1ForCausalLM": Family(falcon_h1, "falcon_h1"),
}
