"""Vision encoders with rotary positions: Qwen2-VL's, Qwen2.5-VL's, GLM-4V's, Pixtral's and Kimi's."""

from __future__ import annotations

from calc.errors import InputError
from calc.model.families.common import LAYER_NORM, num_layers
from calc.model.families.vision_towers import CLIP, encoder_layer, output_size, patches, video_patches, vit_layer
from calc.model.feed_forward import MLP
from calc.model.fields import Fields
from calc.model.spec import Layer, Stack, Tower
from calc.model.weights import Dim, Norm, Part, Weight, convolution, dim, linear

_FUSED = ("qkv", "qkv", "qkv", "proj")
_RMS = {"kind": "rms"}


def _tower(fields: Fields, layer: Layer, *parts: Part) -> Tower:
    depth = fields.size("depth", "num_hidden_layers", high=4096)
    fields.ignore("in_chans", "spatial_patch_size", "tokens_per_second", "window_size", "fullatt_block_indexes")
    return Tower("vision", Stack((layer,), (0,) * depth), parts)


def _merger(fields: Fields, h: Dim, out: Dim, norm: Norm) -> Part:
    """A square of patches becomes one token: a norm over each, and two linear layers over all of them."""
    merge = fields.size("spatial_merge_size", high=64)
    joined = dim("m", merge * merge) * h
    weights = (*linear("up", "mlp.0", joined, joined, bias=True), *linear("down", "mlp.2", out, joined, bias=True))
    return Part("merger", (*norm.weights, *weights))


def qwen2_tower(fields: Fields, hidden_size: int) -> Tower:
    """Qwen2-VL's: LayerNorms, a plain MLP, patches of two frames without bias."""
    width, ratio = fields.size("embed_dim"), fields.size("mlp_ratio", high=64)
    h, out = dim("h", width), output_size(fields, "hidden_size", hidden_size)
    activation = fields.text("hidden_act", default="quick_gelu")
    layer = vit_layer(width, fields.size("num_heads"), width * ratio, activation, (*_FUSED, "fc1", "fc2"), rotary=True)
    patch = Part("embedding", convolution("patch", "proj", h, video_patches(fields)))
    return _tower(fields, layer, patch, _merger(fields, h, out, Norm("norm", h, **LAYER_NORM)))


def qwen2_5_tower(fields: Fields, hidden_size: int) -> Tower:
    """Qwen2.5-VL's: RMSNorms, a gated MLP with biases; most layers see a window, which no count depends on."""
    width = fields.size("hidden_size")
    h, out = dim("h", width), output_size(fields, "out_hidden_size", hidden_size)
    feed_forward = MLP(
        width, fields.size("intermediate_size"), bias=True, activation=fields.text("hidden_act", default="silu")
    )
    layer = encoder_layer(width, fields.size("num_heads"), feed_forward, _FUSED, norm=_RMS, rotary=True)
    patch = Part("embedding", convolution("patch", "proj", h, video_patches(fields)))
    return _tower(fields, layer, patch, _merger(fields, h, out, Norm("norm", h)))


def glm4v_tower(fields: Fields, hidden_size: int) -> Tower:
    """GLM-4V's: a convolution joins each square of patches, and a gated MLP follows it. The layers' MLP is as wide as the output."""
    width = fields.size("hidden_size")
    h, out = dim("h", width), output_size(fields, "out_hidden_size", hidden_size)
    activation = fields.text("hidden_act", default="silu")
    bias = "qkv" if fields.flag("attention_bias", default=False) else ""
    feed_forward = MLP(width, out.size, activation=activation)
    layer = encoder_layer(width, fields.size("num_heads"), feed_forward, _FUSED, bias, _RMS, rotary=True)
    count = (fields.size("image_size") // fields.size("patch_size")) ** 2
    merge = dim("m", fields.size("spatial_merge_size", high=64))
    embedding = (
        *convolution("patch", "proj", h, video_patches(fields), bias=True),
        Weight("position", (dim("n", count), h)),
        *Norm("norm", h).weights,
    )
    merger = (
        *Norm("norm_before", h).weights,
        *convolution("downsample", "downsample", out, h * merge * merge, bias=True),
        *linear("projection", "merger.proj", out, out),
        *Norm("norm", out, **LAYER_NORM).weights,
        *MLP(out.size, fields.size("intermediate_size"), activation=activation).weights,
    )
    return _tower(fields, layer, Part("embedding", embedding), Part("merger", merger))


def pixtral_tower(fields: Fields) -> Tower:
    """Pixtral's: Llama's layers over patches that all see each other, a norm before them."""
    width = fields.size("hidden_size")
    inputs, _ = patches(fields)
    h = dim("h", width)
    if (size := fields.size_or_none("head_dim")) and size * fields.size("num_attention_heads") != width:
        raise InputError.of(fields.name("head_dim"), size, "it must be hidden_size / num_attention_heads")
    feed_forward = MLP(width, fields.size("intermediate_size"), activation=fields.text("hidden_act", default="gelu"))
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    layer = encoder_layer(width, fields.size("num_attention_heads"), feed_forward, modules, "", _RMS, rotary=True)
    embedding = (*convolution("patch", "patch_conv", h, inputs), *Norm("norm", h).weights)
    fields.ignore("vocab_size", "layer_norm_eps", "adapter_bias", "mm_projector_id", "add_pre_mm_projector_layer_norm")
    return Tower("vision", Stack((layer,), (0,) * num_layers(fields)), (Part("embedding", embedding),))


def kimi_tower(fields: Fields) -> Tower:
    """Kimi's MoonViT: LayerNorms, and a learned table of positions by row and column with the rotary ones."""
    width = fields.size("hidden_size")
    h, patch = dim("h", width), dim("p", fields.size("patch_size"))
    layer = vit_layer(
        width,
        fields.size("num_attention_heads"),
        fields.size("intermediate_size"),
        fields.text("hidden_act", default="gelu_pytorch_tanh"),
        (*CLIP[:3], "proj", *CLIP[4:]),
        rotary=True,
    )
    rows, columns = dim("n_r", fields.size("pos_emb_height")), dim("n_c", fields.size("pos_emb_width"))
    embedding = (
        *convolution("patch", "proj", h, dim("3", 3) * patch * patch, bias=True),
        Weight("position", (rows, columns, h)),
    )
    norm = Norm("final_norm", h, **LAYER_NORM)
    fields.ignore("pos_emb_time", "pos_emb_type")
    return Tower(
        "vision",
        Stack((layer,), (0,) * num_layers(fields)),
        (Part("embedding", embedding), Part("norms", norm.weights)),
    )
