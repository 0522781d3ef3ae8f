"""Vision encoders of a language model: CLIP, SigLIP, InternVL's, Qwen 3's and Gemma 4's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calc.errors import InputError
from calc.model.families.common import LAYER_NORM, num_layers, uniform
from calc.model.feed_forward import MLP
from calc.model.fields import Fields
from calc.model.mixers import Attention
from calc.model.spec import Layer, Stack, Tower
from calc.model.weights import Dim, Norm, Part, Weight, convolution, dim, linear


def patches(fields: Fields) -> tuple[Dim, int]:
    """(inputs of one patch, patches of an image)."""
    size, patch = fields.size("image_size"), fields.size("patch_size")
    channels = fields.size("num_channels", default=3)
    return dim("c", channels) * dim("p", patch) * dim("p", patch), (size // patch) ** 2


def video_patches(fields: Fields) -> Dim:
    """Inputs of one patch of several frames."""
    patch = dim("p", fields.size("patch_size"))
    frames = dim("t", fields.size("temporal_patch_size"))
    return dim("c", fields.size("in_channels", default=3)) * frames * patch * patch


def output_size(fields: Fields, key: str, hidden_size: int) -> Dim:
    """The width that the encoder hands on: the language model's, or the model could not run."""
    out = fields.size(key)
    if out != hidden_size:
        raise InputError.of(fields.name(key), out, f"it must equal the language model's hidden_size ({hidden_size})")
    return dim("h_t", out)


def encoder_layer(
    width: int,
    heads: int,
    feed_forward: MLP,
    modules: tuple[str, str, str, str],
    bias: str = "qkvo",
    norm: Mapping[str, Any] = LAYER_NORM,
    extra: tuple[Part, ...] = (),
    **traits: Any,
) -> Layer:
    """A pre-norm encoder layer whose tokens see each other. `modules`: query, key, value, output; `bias` their letters."""
    if width % heads:
        raise InputError(f"num_attention_heads ({heads}) must divide hidden_size ({width})", "num_attention_heads")
    traits = {"causal": False, "rotary": False} | traits
    mixer = Attention(width, heads, heads, width // heads, width // heads, bias, modules, **traits)
    norms = tuple(Norm(name, dim("h", width), **norm) for name in ("input_norm", "post_attention_norm"))
    return Layer("layer", mixer, feed_forward, norms, extra=extra)


def vit_layer(
    width: int, heads: int, inner: int, activation: str, modules: tuple[str, ...], bias: str = "qkvo", **traits: Any
) -> Layer:
    """An encoder layer with LayerNorms and biases. `modules`: query, key, value, output, up, down."""
    query, key, value, output, up, down = modules
    feed_forward = MLP(width, inner, False, True, activation, ("", up, down))
    return encoder_layer(width, heads, feed_forward, (query, key, value, output), bias, **traits)


CLIP = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


def _clip_stack(fields: Fields, activation: str) -> Stack:
    layer = vit_layer(
        fields.size("hidden_size"),
        fields.size("num_attention_heads"),
        fields.size("intermediate_size"),
        fields.text("hidden_act", default=activation),
        CLIP,
    )
    return uniform(fields, layer)


def clip_tower(fields: Fields, name: str = "vision") -> Tower:
    """CLIP's vision transformer: a class token, learned positions, a norm before and one after."""
    inputs, count = patches(fields)
    h = dim("h", fields.size("hidden_size"))
    fields.ignore("projection_dim", "vocab_size", "layer_norm_eps", "attention_dropout", "dropout")
    embedding = (
        Weight("class", (h,)),
        *convolution("patch", "patch_embedding", h, inputs),
        Weight("position", (dim("n", count + 1), h)),
    )
    norms = (*Norm("pre_norm", h, **LAYER_NORM).weights, *Norm("post_norm", h, **LAYER_NORM).weights)
    return Tower(name, _clip_stack(fields, "quick_gelu"), (Part("embedding", embedding), Part("norms", norms)))


def siglip_tower(fields: Fields, name: str = "vision", head: bool = True) -> Tower:
    """SigLIP's: patches with bias, no class token, and an attention-pooling head unless `vision_use_head` is false; a class that
    never builds one is read with `head` false."""
    inputs, count = patches(fields)
    h = dim("h", fields.size("hidden_size"))
    embedding = (
        *convolution("patch", "patch_embedding", h, inputs, bias=True),
        Weight("position", (dim("n", count), h)),
    )
    parts = [Part("embedding", embedding), Part("norms", Norm("post_norm", h, **LAYER_NORM).weights)]
    wanted = fields.flag("vision_use_head", default=True) if "vision_use_head" in fields.data else True
    fields.ignore("projection_dim", "num_image_tokens", "projector_hidden_act", "vocab_size", "num_positions")
    if head and wanted:
        f = dim("f", fields.size("intermediate_size"))
        pooling = (
            Weight("probe", (h,)),
            *linear("input", "", dim("3", 3) * h, h, bias=True),
            *linear("output", "out_proj", h, h, bias=True),
            *Norm("norm", h, **LAYER_NORM).weights,
            *linear("up", "fc1", f, h, bias=True),
            *linear("down", "fc2", h, f, bias=True),
        )
        parts.append(Part("pooling_head", pooling))
    return Tower(name, _clip_stack(fields, "gelu_pytorch_tanh"), tuple(parts))


def _side(fields: Fields, key: str) -> int:
    """An edge in pixels; a list gives it twice."""
    value = fields.data.get(key, fields.defaults.get(key))
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise InputError.of(fields.name(key), value, "only squares are understood")
        fields.data = {**fields.data, key: value[0]}
    return fields.size(key)


def internvl_tower(fields: Fields) -> Tower:
    """InternVL's: layers whose halves are scaled by learned vectors, a class token, learned positions unless switched off."""
    width, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    h, patch = dim("h", width), dim("p", _side(fields, "patch_size"))
    count = (_side(fields, "image_size") // patch.size) ** 2
    kind = fields.text("norm_type", default="layer_norm")
    if kind not in ("layer_norm", "rms_norm"):
        raise InputError.of(fields.name("norm_type"), kind, 'it must be "layer_norm" or "rms_norm"')
    norm: Mapping[str, Any] = LAYER_NORM if kind == "layer_norm" else {"kind": "rms"}
    traits = {}
    if fields.flag("use_qk_norm", default=False):
        traits = {"q_norm": Norm("query_norm", h), "k_norm": Norm("key_norm", h)}
    letters = "qkvo" if fields.flag("attention_bias", default=False) else "o"
    modules = ("q_proj", "k_proj", "v_proj", "projection_layer", "fc1", "fc2")
    activation = fields.text("hidden_act", default="gelu")
    scales = (Part("scales", (Weight("lambda_1", (h,)), Weight("lambda_2", (h,)))),)
    heads = fields.size("num_attention_heads")
    layer = vit_layer(width, heads, inner, activation, modules, letters, norm=norm, extra=scales, **traits)
    channels = dim("c", fields.size("num_channels", default=3))
    embedding = [Weight("class", (h,)), *convolution("patch", "projection", h, channels * patch * patch, bias=True)]
    if fields.flag("use_mask_token", default=False):
        embedding.append(Weight("mask", (h,)))
    if fields.flag("use_absolute_position_embeddings", default=True):
        embedding.append(Weight("position", (dim("n", count + 1), h)))
    parts = [Part("embedding", tuple(embedding))]
    if not fields.flag("use_mean_pooling", default=True):
        parts.append(Part("norms", Norm("final_norm", h, **LAYER_NORM).weights))
    fields.ignore("projection_dropout", "layer_scale_init_value")
    return Tower("vision", uniform(fields, layer), tuple(parts))


def qwen_tower(fields: Fields, hidden_size: int, deepstack: bool = True) -> Tower:
    """Qwen3-VL's and Qwen3.5's: patches of two frames, learned positions, mergers that join 2 x 2 patches into one token."""
    width, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    depth = fields.size("depth", high=4096)
    h, inputs = dim("h", width), video_patches(fields)
    out = output_size(fields, "out_hidden_size", hidden_size)
    modules = ("qkv", "qkv", "qkv", "proj", "linear_fc1", "linear_fc2")
    layer = vit_layer(
        width,
        fields.size("num_heads"),
        inner,
        fields.text("hidden_act", default="gelu_pytorch_tanh"),
        modules,
        rotary=True,
    )
    merge = fields.size("spatial_merge_size", high=64)
    joined = dim("m", merge * merge) * h

    def merger(name: str, norm: Dim, copies: int = 1) -> Part:
        weights = (
            *Norm("norm", norm, **LAYER_NORM).weights,
            *linear("up", "linear_fc1", joined, joined, bias=True),
            *linear("down", "linear_fc2", out, joined, bias=True),
        )
        return Part(name, weights, copies, copies)

    positions = Weight("position", (dim("n", fields.size("num_position_embeddings")), h))
    parts = [Part("embedding", (*convolution("patch", "proj", h, inputs, bias=True), positions)), merger("merger", h)]
    indexes = (fields.items("deepstack_visual_indexes") or []) if deepstack else []
    fields.ignore("deepstack_visual_indexes")
    if indexes:
        parts.append(merger("deepstack_mergers", joined, len(indexes)))
    return Tower("vision", Stack((layer,), (0,) * depth), tuple(parts))


def gemma4_tower(fields: Fields, hidden_size: int) -> Tower:
    """Gemma 4's: Gemma layers that see all patches, with two learned tables of positions (rows and columns)."""
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv, size = fields.size("num_key_value_heads"), fields.size("head_dim")
    if fields.flag("attention_bias", default=False):
        raise InputError.of(fields.name("attention_bias"), True, "only false is understood")
    h, d = dim("h", width), dim("d", size)
    mixer = Attention(
        width,
        heads,
        kv,
        size,
        size,
        q_norm=Norm("query_norm", d, style="wide"),
        k_norm=Norm("key_norm", d, style="wide"),
        v_norm=Norm("value_norm", d, style="wide", weight=False),
        causal=False,
    )
    names = ("input_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm")
    norms = tuple(Norm(name, h, style="wide") for name in names)
    activation = fields.text("hidden_activation", default="gelu_pytorch_tanh")
    layer = Layer("layer", mixer, MLP(width, fields.size("intermediate_size"), activation=activation), norms)
    patch = dim("p", fields.size("patch_size"))
    tables = (dim("2", 2), dim("n", fields.size("position_embedding_size")), h)
    embedding = (
        Weight("position", tables),
        *linear("patch", "input_proj", h, dim("3", 3) * patch * patch),
    )
    projection = linear("projection", "embedding_projection", dim("h_t", hidden_size), h)
    fields.ignore(
        "global_head_dim", "default_output_length", "pooling_kernel_size", "standardize", "use_clipped_linears"
    )
    fields.ignore("max_position_embeddings")
    return Tower(
        "vision",
        Stack((layer,), (0,) * num_layers(fields)),
        (Part("embedding", embedding), Part("projector", projection)),
    )
