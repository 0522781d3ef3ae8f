"""Dense decoders with something of their own inside: a norm before the last projection (BitNet), differential attention, LayerNorm."""

from __future__ import annotations

from dataclasses import replace

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import LAYER_NORM, heads, hidden
from calc.model.families.dense import Traits, dense
from calc.model.fields import Fields
from calc.model.spec import ModelSpec
from calc.model.weights import Norm, Weight, dim


def bitnet(fields: Fields) -> ModelSpec:
    """BitNet b1.58 (arXiv 2402.17764) as transformers builds it: a norm before each half's last projection, in 16 bits."""
    inner = dim("f", fields.size("intermediate_size"))
    norms = (Norm("sub_norm", width).weights for width in (dim("h", hidden(fields)), inner))
    attention, forward = norms
    traits = Traits(attention={"extra": attention}, mlp={"extra": forward})
    spec = dense(traits)(fields)
    return replace(spec, estimates=("a norm stands before the last projection of attention and MLP",))


def diffllama(fields: Fields) -> ModelSpec:
    """DiffLlama (differential attention, arXiv 2410.05258): two attention calls a layer, weighed by four learned vectors."""
    _, kv, head_dim = heads(fields)
    if kv % 2:
        raise InputError.of("num_key_value_heads", kv, "the class needs an even number")
    if fields.number("attention_dropout", default=0.0, high=1.0):
        raise InputError.of("attention_dropout", fields.data["attention_dropout"], "the class refuses any but 0")
    vectors = tuple(Weight(f"lambda_{name}", (dim("d", head_dim),)) for name in ("q1", "k1", "q2", "k2"))
    fields.ignore("lambda_std_dev")
    spec = dense(Traits(attention={"extra": vectors, "passes": 2}))(fields)
    return replace(spec, estimates=("attention is called twice, over each half of the values",))


FAMILIES = {
    "BitNetForCausalLM": Family(bitnet, "bitnet"),
    "DiffLlamaForCausalLM": Family(diffllama, "diffllama"),
    "MinistralForCausalLM": Family(dense(Traits(bias_flag="", windows=(0, 1))), "ministral"),
    "NemotronForCausalLM": Family(
        dense(
            Traits(
                mlp_bias_flag="mlp_bias", mlp={"gated": False, "modules": ("", "up_proj", "down_proj")}, norm=LAYER_NORM
            )
        ),
        "nemotron",
    ),
}
