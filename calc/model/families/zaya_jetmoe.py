"""Decoders whose attention and routers are their own: ZAYA1's compressed convolutions, JetMoE's experts for queries and outputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    assemble,
    attention,
    bias,
    dropouts,
    heads,
    hidden,
    layer_types,
    moe,
    norms,
    patterned,
    uniform,
)
from calc.model.fields import Fields
from calc.model.mixers import Recurrence
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Dim, Norm, Part, Split, State, Weight, dim, linear

_DROPOUT = {"attention": "attention_dropout"}


def _compressed_convolution(h: Dim, queries: Dim, keys: Dim, head: Dim, first: Dim, second: Dim) -> Recurrence:
    """The convolutions over query and key of compressed convolutional attention (arXiv 2510.04476): one by channel, one by head,
    and half of each value taken from the token before."""
    channels = queries + keys
    taps = Dim(first.size + second.size - 2, f"({first.latex} + {second.latex} - 2)", first.numbers + second.numbers)
    half = Dim(keys.size // 2, rf"\frac{{{keys.latex}}}{{2}}", keys.numbers)
    weights = (
        Weight("depthwise", (channels, first)),
        Weight("depthwise_bias", (channels,)),
        Weight("grouped", (channels, head, second)),
        Weight("grouped_bias", (channels,)),
    )
    states = (State("convolution", channels * taps), State("value_before", half))
    two = dim("2", 2)
    flops = two * channels * first + two * channels * head * second
    return Recurrence("compression", weights, states, flops, channels + channels)


def _zaya_router(fields: Fields, experts: int, first: bool) -> tuple[Weight, ...]:
    """A small MLP over a narrow state that the layers pass on, with one place more for the expert that does nothing."""
    h, r = dim("h", hidden(fields)), dim("r", fields.size("router_hidden_size"))
    scale = () if first else (Weight("state_scale", (r,)),)
    return (
        *linear("down", "down_proj", r, h, bias=True),
        *scale,
        *Norm("norm", r).weights,
        *linear("first", "fc1", r, r, bias=True),
        *linear("second", "fc2", r, r, bias=True),
        *linear("output", "out_proj", dim("E", experts + 1), r),
    )


def zaya(fields: Fields) -> ModelSpec:
    """ZAYA1 (arXiv 2511.17127): compressed convolutional attention, a router that is an MLP, learned scales on every residual."""
    query, kv, size = heads(fields)
    if kv * size % 2:
        raise InputError.of("num_key_value_heads", kv, "times head_dim it must be even: half of each value is older")
    h, d, k = dim("h", hidden(fields)), dim("d", size), dim("k", kv)
    letters = bias(fields)
    found = layer_types(fields, {"hybrid": "full", "hybrid_sliding": "sliding"})
    half = Dim(kv * size // 2, r"\frac{<k> \cdot <d>}{2}", k.numbers + d.numbers)
    values = tuple(
        weight
        for name, module in (("value_now", "v_proj_current"), ("value_before", "v_proj_delayed"))
        for weight in linear(name, module, half, h, Split.KV, "v" in letters)
    )
    times = (dim("K_1", fields.size("cca_time0")), dim("K_2", fields.size("cca_time1")))
    compression = _compressed_convolution(h, dim("a", query) * d, k * d, d, *times)
    plain = moe(fields, activation="silu")
    scales = [
        Weight(f"{at}_{name}", (h,)) for at in ("attention", "mlp") for name in ("scale", "bias", "kept", "kept_bias")
    ]

    def layer(kind: str) -> Layer:
        width = fields.size("sliding_window") if kind.endswith("sliding") else 0
        extra = (*values, Weight("key_temperature", (k,)))
        mixer = attention(fields, sizes=(query, kv, size), bias=letters, window=width, key_is_value=True, extra=extra)
        router = _zaya_router(fields, plain.num_experts, kind.startswith("first_"))
        forward = replace(plain, router=router)
        return Layer(kind, mixer, forward, norms(fields), extra=(Part("residuals", tuple(scales)),), second=compression)

    kinds = [f"first_{found[0]}", *found[1:]]
    fields.ignore("sliding_window", "num_experts_per_tok", "hidden_act")
    fields.assumptions.append(
        "every token uses an expert that computes: the most; one place of the router does nothing"
    )
    return assemble(
        fields,
        patterned({kind: partial(layer, kind) for kind in dict.fromkeys(kinds)}, kinds),
        tied=True,
        head_bias=fields.flag("lm_head_bias", default=False),
        embeddings=(Weight("scale", (h,)), Weight("bias", (h,))),
        dropout=dropouts(fields, **_DROPOUT),
    )


def jetmoe(fields: Fields) -> ModelSpec:
    """JetMoE (arXiv 2404.07413): experts for the MLP, and for the query and output projections of attention; keys and values are
    common to all."""
    h, kv = hidden(fields), fields.size("num_key_value_heads")
    size, active = fields.size("kv_channels", "head_dim"), fields.size("num_experts_per_tok")
    names = ("", "kv_proj", "kv_proj", "")
    mixer = attention(fields, sizes=(kv * active, kv, size), modules=names, routed=True)
    forward = moe(fields, experts=("num_local_experts",), width=("intermediate_size",))
    wide, experts = dim("k", kv) * dim("d", size), forward.num_experts
    weights = (*linear("query", "", wide, dim("h", h)), *linear("output", "", dim("h", h), wide))
    bias_of = (Weight("bias", (dim("h", h),)),)
    extra = (
        Part("attention_experts", weights, experts, active),
        Part("attention_router", (*forward.router, *bias_of)),
        Part("mlp_bias", bias_of),
    )
    fields.ignore("num_attention_heads", "aux_loss_coef")
    return assemble(
        fields,
        uniform(fields, Layer("layer", mixer, forward, norms(fields), extra=extra)),
        tied=True,
        dropout=dropouts(fields, **_DROPOUT),
    )


FAMILIES = {
    "JetMoeForCausalLM": Family(jetmoe, "jetmoe"),
    "ZayaForCausalLM": Family(zaya, "zaya"),
}
