"""Decoders with LayerNorm and plain MLPs: GPT-2 and its kin."""

from __future__ import annotations

from calc.model.families.base import Family
from calc.model.families.common import assemble, attention, dropouts, hidden, mlp, norms, uniform
from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Norm, Weight, dim


def gpt2(fields: Fields) -> ModelSpec:
    h = hidden(fields)
    places = {"attention": "attn_pdrop", "residual": "resid_pdrop", "embedding": "embd_pdrop"}
    mixer = attention(fields, bias="qkvo", modules=("c_attn", "c_attn", "c_attn", "c_proj"), rotary=False)
    width = fields.size_or_none("n_inner") or 4 * h
    activation = fields.text("activation_function", default="gelu_new")
    feed_forward = mlp(
        fields, width=width, gated=False, bias=True, activation=activation, modules=("", "c_fc", "c_proj")
    )
    layer = Layer("layer", mixer, feed_forward, norms(fields, kind="layer", style="native", bias=True))
    positions = Weight("position", (dim("s_{max}", fields.size("n_positions", "n_ctx", default=1024)), dim("h", h)))
    return assemble(
        fields,
        uniform(fields, layer),
        tied=True,
        final_norm=Norm("weight", dim("h", h), "layer", "native", bias=True),
        embeddings=(positions,),
        dropout=tuple((place, p) for place, p in dropouts(fields, **places)),
    )


FAMILIES = {"GPT2LMHeadModel": Family(gpt2, "gpt2")}
