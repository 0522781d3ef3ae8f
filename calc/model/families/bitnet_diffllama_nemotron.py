"""Dense decoders with something of their own inside: a norm before the last projection (BitNet), differential attention, LayerNorm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    FULL_OR_SLIDING,
    LAYER_NORM,
    assemble,
    attention,
    bias,
    dropouts,
    heads,
    hidden,
    layer_types,
    mlp,
    norms,
    num_layers,
    patterned,
    uniform,
    whole_heads,
)
from calc.model.families.llama_variants import Traits, dense
from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec
from calc.model.weights import Norm, Part, Weight, dim, linear


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


def doge(fields: Fields) -> ModelSpec:
    """Doge: a learned mask over the values, and a learned weight on each residual."""
    if fields.flag("is_moe", default=False):
        raise InputError.of("is_moe", True, "only false is understood: its experts are single rows")
    _, kv, head_dim = heads(fields)
    h, letters = dim("h", hidden(fields)), bias(fields)
    k, d = dim("k", kv), dim("d", head_dim)
    mask = (*linear("mask", "dt_proj", k, k * d, bias=bool(letters)), Weight("mask_rate", (k,)))
    mixer = attention(fields, "head", bias=letters, window=fields.size_or_none("sliding_window") or 0, extra=mask)
    residuals = Part("residuals", (Weight("attention", (h,)), Weight("mlp", (h,))))
    forward = mlp(fields, bias=fields.flag("mlp_bias", default=False))
    layer = Layer("layer", mixer, forward, norms(fields), extra=(residuals,))
    fields.ignore("keep_window_size", "num_experts", "num_experts_per_tok")
    return assemble(
        fields,
        uniform(fields, layer),
        dropout=dropouts(fields, attention="attention_dropout", residual="hidden_dropout"),
        estimates=("attention takes a mask made from the values, and residuals are weighed",),
    )


def modernbert_decoder(fields: Fields) -> ModelSpec:
    """The decoder of ModernBERT (Ettin, arXiv 2507.11412): windows on two layers of three; no norm before the first attention."""
    every = fields.size("global_attn_every_n_layers", default=3) if fields.has("global_attn_every_n_layers") else 3
    count, local = num_layers(fields), fields.size_or_none("local_attention") or 0
    kinds = layer_types(fields, FULL_OR_SLIDING, ["sliding" if at % every else "full" for at in range(count)])
    if "sliding" in kinds and local < 2:
        raise InputError.of("local_attention", local, "layers with a window need at least 2")
    style = {**LAYER_NORM, "bias": fields.flag("norm_bias", default=False)}
    h, letters, has_bias = dim("h", hidden(fields)), bias(fields), fields.flag("mlp_bias", default=False)

    def layer(kind: str) -> Layer:
        first = kind.startswith("first_")
        names = ("pre_feedforward_norm",) if first else ("input_norm", "post_attention_norm")
        width = local // 2 if kind.endswith("sliding") else 0
        modules = ("q_proj", "k_proj", "v_proj", "Wo")
        mixer = attention(fields, sizes=whole_heads(fields), bias=letters, window=width, modules=modules)
        forward = mlp(fields, bias=has_bias, modules=("Wi", "Wi", "Wo"))
        return Layer(kind, mixer, forward, norms(fields, *names, **style))

    kinds = [f"first_{kinds[0]}", *kinds[1:]]
    dense_head = linear("dense", "dense", h, h, bias=fields.flag("classifier_bias", default=False))
    head = Part("prediction_head", (*dense_head, *Norm("norm", h, **style).weights))
    fields.ignore("initializer_cutoff_factor", "classifier_activation", "classifier_dropout", "classifier_pooling")
    fields.ignore("global_rope_theta", "local_rope_theta", "sliding_window", "num_key_value_heads", "head_dim")
    fields.ignore("global_attn_every_n_layers")
    return assemble(
        fields,
        patterned({kind: partial(layer, kind) for kind in set(kinds)}, kinds),
        tied=True,
        embeddings=Norm("norm", h, **style).weights,
        final_norm=Norm("weight", h, **style),
        head_bias=fields.flag("decoder_bias", default=True),
        other=(head,),
        dropout=dropouts(fields, attention="attention_dropout", residual="mlp_dropout", embedding="embedding_dropout"),
    )


FAMILIES = {
    "BitNetForCausalLM": Family(bitnet, "bitnet"),
    "DiffLlamaForCausalLM": Family(diffllama, "diffllama"),
    "DogeForCausalLM": Family(doge, "doge"),
    "ModernBertDecoderForCausalLM": Family(modernbert_decoder, "modernbert_decoder"),
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
