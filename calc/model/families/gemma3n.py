"""Gemma 3n: several streams of the residual (AltUp), a low-rank path (Laurel), inputs by layer, an audio and a vision encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import assemble, attention, bias, dropouts, full_or_sliding, hidden, mlp, norms
from calc.model.families.gemma4 import NORMS, first_shared, per_layer_input, per_layer_tables
from calc.model.families.vision_language import with_text
from calc.model.families.vision_towers import encoder_layer
from calc.model.feed_forward import MLP
from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec, Stack, Tower
from calc.model.weights import Dim, Norm, Part, Weight, dim, linear

_WIDE = {"style": "wide"}
# Vision encoders that timm builds, by their name there: their parameters, counted in timm 1.0.31
_TIMM = {"mobilenetv5_300m_enc": 294_126_912}
_STREAMS = "AltUp: its streams' small products are not in the FLOPs, and the activations of training hold one stream of the residual"
_NOTE = (
    "the vision encoder is timm's mobilenetv5_300m_enc, taken as one number: its 294,126,912 parameters in timm 1.0.31"
)


def _widths(fields: Fields, count: int) -> list[int]:
    """The MLP's width in each layer, from one number or from a list."""
    if not isinstance(fields.data.get("intermediate_size"), list):
        return [fields.size("intermediate_size")] * count
    found = fields.items("intermediate_size", length=count) or []
    return [Fields({"intermediate_size": value}, fields.where, fields).size("intermediate_size") for value in found]


def _streams(fields: Fields) -> tuple[Part, ...]:
    """AltUp (arXiv 2301.13310): what predicts and corrects the streams around a layer. Laurel (arXiv 2411.07501) next to it."""
    h, n = dim("h", hidden(fields)), dim("n", fields.size("altup_num_inputs", high=64))
    rank = dim("r_l", fields.size("laurel_rank"))
    altup = (
        Weight("scale", (h,)),
        *linear("correction", "correction_coefs", n, n),
        *linear("prediction", "prediction_coefs", n * n, n),
        *linear("router", "modality_router", n, h),
        *Norm("router_norm", h, **_WIDE).weights,  # type: ignore[arg-type]
    )
    laurel = (
        *linear("left", "linear_left", rank, h),
        *linear("right", "linear_right", h, rank),
        *Norm("norm", h, **_WIDE).weights,  # type: ignore[arg-type]
    )
    return (Part("altup", altup), Part("laurel", laurel))


def gemma3n_text(fields: Fields) -> ModelSpec:
    kinds, window = full_or_sliding(fields, 5)
    first = first_shared(fields, kinds)
    d = dim("d", fields.size("head_dim"))
    extra = (*_streams(fields), *per_layer_input(fields))

    def layer(kind: str, shares: bool, width: int, several: bool) -> Layer:
        value_norm = Norm("value_norm", d, style="wide", weight=False)
        traits: dict[str, Any] = {
            "window": window if kind == "sliding" else 0,
            "v_norm": value_norm,
            "shares_kv": shares,
        }
        mixer = attention(fields, "head", norm_traits=_WIDE, bias=bias(fields), **traits)
        activation = fields.text("hidden_activation", default="gelu_pytorch_tanh")
        name = (f"{kind}_shared" if shares else kind) + (f"_{width}" if several else "")
        return Layer(
            name, mixer, mlp(fields, width=width, activation=activation), norms(fields, *NORMS, **_WIDE), extra=extra
        )

    widths = _widths(fields, len(kinds))
    rows = [(kind, at >= first, widths[at], len({*widths}) > 1) for at, kind in enumerate(kinds)]
    present = list(dict.fromkeys(rows))
    tables, other = per_layer_tables(fields)
    h, streams = dim("h", hidden(fields)), fields.size("altup_num_inputs", high=64) - 1
    projections = (*linear("spread", "altup_projections", h, h), *linear("join", "altup_unembed_projections", h, h))
    if streams:
        other = (*other, Part("altup", projections, streams, streams))
    for key in ("altup_active_idx", "altup_coef_clip", "altup_correct_scale", "activation_sparsity_pattern"):
        fields.ignore(key)
    return assemble(
        fields,
        Stack(tuple(layer(*row) for row in present), tuple(present.index(row) for row in rows)),
        tied=True,
        final_norm=Norm("weight", h, style="wide"),
        embeddings=tables,
        other=other,
        embedding_scale=True,
        assumptions=(_STREAMS,),
        logit_softcap=fields.number("final_logit_softcapping", default=0.0) > 0,
        dropout=dropouts(fields, attention="attention_dropout"),
    )


def _embedder(fields: Fields, hidden_size: int) -> Part:
    """What brings an encoder's output, and tokens of its own, to the language model's width."""
    width = dim("h_m", fields.size("hidden_size"))
    fields.ignore("vocab_offset")
    weights = (
        Weight("token", (dim("V_m", fields.size("vocab_size")), width)),
        *Norm("hard_norm", width).weights,
        *Norm("soft_norm", width).weights,
        *linear("projection", "embedding_projection", dim("h_t", hidden_size), width),
    )
    return Part("projector", weights)


def _pairs(fields: Fields, key: str) -> list[Any]:
    """Two entries of a list, one for each convolution over the sound."""
    found = fields.items(key, length=2)
    if found is None:
        raise InputError(f"{fields.name(key)}: missing; it must be a list of 2", fields.name(key))
    return found


def _convolutions(fields: Fields, h: Dim) -> Part:
    """Two convolutions over time and frequency, and a projection of what they leave."""
    channels = [
        Fields({"c": value}, fields.where, fields).size("c") for value in _pairs(fields, "sscp_conv_channel_size")
    ]
    kernels, strides = _pairs(fields, "sscp_conv_kernel_size"), _pairs(fields, "sscp_conv_stride_size")
    features, before = fields.size("input_feat_size"), dim("1", 1)
    weights: list[Weight] = []
    for at, (channel, kernel, stride) in enumerate(zip(channels, kernels, strides, strict=True)):
        sides = [
            Fields({"k": side}, fields.where, fields).size("k", high=1024) for side in (*_two(kernel), *_two(stride))
        ]
        features = (features + 2 - sides[1]) // sides[3] + 1  # one row of padding at each side of the frequencies
        if features < 1:
            raise InputError.of(fields.name("sscp_conv_kernel_size"), kernel, "it must fit the frequencies")
        out = dim(f"c_{at}", channel)
        kernel_dim = dim("k_t", sides[0]) * dim("k_f", sides[1])
        weights += [Weight(f"convolution_{at}", (out, before * kernel_dim), matmul=True), Weight(f"norm_{at}", (out,))]
        before = out
    projection = linear("projection", "input_proj_linear", h, before * dim("F", features))
    return Part("convolutions", (*weights, *projection))


def _two(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise InputError.of("audio_config", value, "each convolution's kernel and stride must be lists of 2")
    return value[0], value[1]


def _audio(fields: Fields, hidden_size: int) -> Tower:
    """A conformer: two MLPs, attention with learned distances, and a convolution over time, each with its norms."""
    width, count = fields.size("hidden_size"), fields.size("conf_num_attention_heads")
    depth = fields.size("conf_num_hidden_layers", high=4096)
    h, f = dim("h", width), dim("4", 4) * dim("h", width)
    layer = encoder_layer(width, count, MLP(width, 4 * width, False), ("q_proj", "k_proj", "v_proj", "post"), "", _WIDE)
    second = (*linear("up", "ffw_layer_1", f, h), *linear("down", "ffw_layer_2", h, f))
    kernel = dim("k", fields.size("conf_conv_kernel_size", high=4096))
    convolution = (
        *linear("start", "linear_start", dim("2", 2) * h, h),
        Weight("depthwise", (h, kernel)),
        *linear("end", "linear_end", h, h),
    )
    distances = (Weight("scale", (dim("d", width // count),)), *linear("distance", "pos_proj", h, h))
    names = ("attention_post", "mlp_post", "second_mlp", "second_mlp_post", "convolution", "convolution_inner", "final")
    more = tuple(weight for name in names for weight in Norm(f"{name}_norm", h).weights)
    extra = (
        Part("distances", distances),
        Part("second_mlp", second),
        Part("convolution", convolution),
        Part("more_norms", more),
    )
    layer = Layer("layer", layer.mixer, layer.feed_forward, layer.norms, extra=extra)
    for key in ("conf_attention_chunk_size", "conf_attention_context_left", "conf_attention_context_right"):
        fields.ignore(key)
    for key in ("conf_attention_logit_cap", "conf_reduction_factor", "conf_residual_weight", "gradient_clipping"):
        fields.ignore(key)
    fields.ignore("sscp_conv_group_norm_eps", "sscp_conv_eps")
    parts = (_convolutions(fields, h), _embedder(fields, hidden_size))
    return Tower("audio", Stack((layer,), (0,) * depth), parts)


def _vision(fields: Fields, hidden_size: int) -> Tower:
    """timm's encoder as one number, and the projector behind it."""
    name = fields.text("architecture")
    if name not in _TIMM or fields.data.get("model_args"):
        raise InputError.of(fields.name("architecture"), name, f"only {', '.join(_TIMM)} without model_args is known")
    fields.ignore("do_pooling", "model_args", "num_classes", "label_names", "label_descriptions")
    encoder = Part("encoder", (Weight("mobilenet", (dim("P_v", _TIMM[name]),)),))
    return Tower("vision", Stack((), ()), (encoder, _embedder(fields, hidden_size)))


def gemma3n(fields: Fields) -> ModelSpec:
    text = fields.section("text_config")
    width = hidden(text)
    towers = (_vision(fields.section("vision_config"), width), _audio(fields.section("audio_config"), width))
    for key in ("audio_soft_tokens_per_image", "vision_soft_tokens_per_image", "boa_token_id", "eoa_token_id"):
        fields.ignore(key)
    spec = with_text(fields, gemma3n_text, text, True, towers)
    return replace(spec, assumptions=(*spec.assumptions, _NOTE))


FAMILIES = {
    "Gemma3nForCausalLM": Family(gemma3n_text, "gemma3n"),
    "Gemma3nForConditionalGeneration": Family(gemma3n, "gemma3n"),
}
