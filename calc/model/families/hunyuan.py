"""Hunyuan 1: norms over query and key after the rotation; dense, or with experts next to a shared MLP in every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import mlp, moe, num_layers
from calc.model.families.llama_variants import Traits, build, dense
from calc.model.feed_forward import FeedForward
from calc.model.fields import Fields
from calc.model.spec import ModelSpec

_TRAITS = Traits(qk_norm="head")
_AFTER = "query and key are normalised after they are turned"


def _check(fields: Fields) -> None:
    """The class of transformers does not work out a head size that is null. Its first form shared keys and values between
    layers, which this one does not."""
    if fields.data.get("use_cla"):
        raise InputError.of("use_cla", fields.data["use_cla"], "only false or null is understood")
    fields.ignore("use_cla", "cla_share_factor", "use_qk_norm", "attention_head_dim", "mlp_bias", "use_mixed_mlp_moe")
    fields.ignore("add_classification_head", "class_num", "pool_type", "dense_list", "norm_type", "sep_token_id")
    fields.ignore("eod_token_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id")
    if "head_dim" in fields.data and fields.data["head_dim"] is None:
        raise InputError.of("head_dim", None, "the model class needs a whole number")


def hunyuan_dense(fields: Fields) -> ModelSpec:
    _check(fields)
    return replace(dense(_TRAITS)(fields), estimates=(_AFTER,))


def _same(fields: Fields, *keys: str) -> None:
    """A list of one number a layer, whose layers must agree, stands for that number."""
    for key in keys:
        value = fields.data.get(key)
        if isinstance(value, list):
            if not value or any(other != value[0] for other in value):
                raise InputError.of(key, value, "only one number for all layers is understood")
            fields.data = {**fields.data, key: value[0]}


def hunyuan_moe(fields: Fields) -> ModelSpec:
    """Hunyuan-A13B: one MLP, as wide as an expert, serves every token."""
    _check(fields)
    _same(fields, "num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
    width = fields.size("intermediate_size")
    for key, wanted in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if fields.data.get(key, wanted) != wanted:
            raise InputError.of(key, fields.data[key], f"the model class takes {wanted} whatever it says")
        fields.ignore(key)
    shared = mlp(fields, width=width, letter="f_s")
    forwards: dict[str, Callable[[], FeedForward]] = {
        "moe": lambda: moe(fields, width=("intermediate_size",), shared=shared)
    }
    spec = build(fields, _TRAITS, forwards, ["moe"] * num_layers(fields))
    return replace(spec, estimates=(_AFTER,))


FAMILIES = {
    "HunYuanDenseV1ForCausalLM": Family(hunyuan_dense, "hunyuan_v1_dense"),
    "HunYuanMoEV1ForCausalLM": Family(hunyuan_moe, "hunyuan_v1_moe"),
}
