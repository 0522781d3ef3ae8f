"""MiMo-V2-Flash."""

from __future__ import annotations

from calc.errors import InputError
from calc.model.families import multi_token_prediction
from calc.model.families.base import Family
from calc.model.families.common import (
    FULL_OR_SLIDING,
    assemble,
    attention,
    combined,
    dropouts,
    heads,
    layer_types,
    mlp,
    moe,
    norms,
    num_layers,
)
from calc.model.families.qwen2_moe_glm_moe import first_dense
from calc.model.fields import Fields
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec


def mimo_v2_flash(fields: Fields) -> ModelSpec:
    """MiMo-V2-Flash: narrow values, twice the KV heads and sinks where there is a window."""
    count = num_layers(fields)
    legacy = fields.items("hybrid_layer_pattern", length=count)
    default = ["full" if at == 0 or (at + 1) % 6 == 0 else "sliding" for at in range(count)]
    kinds = layer_types(fields, FULL_OR_SLIDING, default)
    if legacy is not None and legacy != [int(kind == "sliding") for kind in kinds]:
        raise InputError.of(
            "hybrid_layer_pattern", legacy, "only the class's own pattern is understood: 1 has a window"
        )
    # the older field counts the tokens before the query, the newer one the query too
    before = fields.size_or_none("sliding_window_size")
    size = before + 1 if before else fields.size("sliding_window")
    heads_, kv, head_dim = heads(fields)
    letters = "qkv" if fields.flag("attention_bias", default=False) else ""

    def mixer(width: int) -> Attention:
        sizes = (heads_, kv * 2 if width else kv, head_dim)
        value = fields.size("v_head_dim")
        return attention(fields, sizes=sizes, v_head_dim=value, bias=letters, window=width, sinks=bool(width))

    freq = fields.items("moe_layer_freq", length=count)
    pattern = first_dense(default=1)(fields)
    if freq is not None and freq != [int(kind == "moe") for kind in pattern]:
        raise InputError.of(
            "moe_layer_freq", freq, "only the class's own pattern is understood: the first layer is dense"
        )
    if fields.size("n_shared_experts", default=0, low=0) if fields.has("n_shared_experts") else 0:
        raise InputError.of("n_shared_experts", fields.data["n_shared_experts"], "the class has none")
    _check_swa(fields, heads_, kv * 2, head_dim)
    layers = combined(
        {"full": lambda: mixer(0), "sliding": lambda: mixer(size)},
        kinds,
        {"moe": lambda: moe(fields), "dense": lambda: mlp(fields)},
        pattern,
        norms(fields),
    )
    fields.ignore(
        "attention_chunk_size", "swa_rope_theta", "attention_value_scale", "n_shared_experts", "intermediate_size"
    )
    spec = assemble(fields, layers, dropout=dropouts(fields, attention="attention_dropout"))
    # its config does not tell of the three dense layers with a window that its checkpoint holds for prediction
    steps = fields.size("num_nextn_predict_layers", default=3, low=0, high=64)
    return multi_token_prediction.with_prediction(spec, steps, Layer("layer", mixer(size), mlp(fields), norms(fields)))


def _check_swa(fields: Fields, count: int, kv: int, head_dim: int) -> None:
    """The class derives the windowed layers' sizes; a config that says otherwise is refused."""
    wanted = {
        "swa_num_attention_heads": count,
        "swa_num_key_value_heads": kv,
        "swa_head_dim": head_dim,
        "swa_v_head_dim": fields.size("v_head_dim"),
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    for key, value in wanted.items():
        fields.ignore(key)
        if fields.data.get(key, value) != value:
            raise InputError.of(key, fields.data[key], f"only {value!r} is understood for this class")


FAMILIES = {"MiMoV2FlashForCausalLM": Family(mimo_v2_flash, "mimo_v2_flash")}
