"""Vision encoders that stand beside a language model: CLIP, SigLIP, Qwen's and Gemma 4's."""

from __future__ import annotations

from calc.errors import InputError
from calc.model.families.common import LAYER_NORM, num_layers, uniform
from calc.model.feed_forward import MLP
from calc.model.fields import Fields
from calc.model.mixers import Attention
from calc.model.spec import Layer, Stack, Tower
from calc.model.weights import Dim, Norm, Part, Weight, dim, linear


def patches(fields: Fields) -> tuple[Dim, int]:
    """(inputs of one patch, patches of an image)."""
    size, patch = fields.size("image_size"), fields.size("patch_size")
    channels = fields.size("num_channels", default=3)
    return dim("c", channels) * dim("p", patch) * dim("p", patch), (size // patch) ** 2


def vit_layer(
    width: int,
    heads: int,
    inner: int,
    activation: str,
    modules: tuple[str, ...],
    fused: bool = False,
    causal: bool = False,
) -> Layer:
    """A pre-norm encoder layer with LayerNorms and biases. `modules`: query, key, value, output, up, down."""
    if width % heads:
        raise InputError(f"num_attention_heads ({heads}) must divide hidden_size ({width})", "num_attention_heads")
    h = dim("h", width)
    query, key, value, output, up, down = modules
    mixer = Attention(
        width,
        heads,
        heads,
        width // heads,
        width // heads,
        "qkvo",
        (query, key, value, output),
        causal=causal,
        rotary=fused,
    )
    norms = (Norm("input_norm", h, **LAYER_NORM), Norm("post_attention_norm", h, **LAYER_NORM))
    return Layer("layer", mixer, MLP(width, inner, False, True, activation, ("", up, down)), norms)


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
        Weight("patch", (h, inputs), module="patch_embedding", matmul=True),
        Weight("position", (dim("n", count + 1), h)),
    )
    norms = (*Norm("pre_norm", h, **LAYER_NORM).weights, *Norm("post_norm", h, **LAYER_NORM).weights)
    return Tower(name, _clip_stack(fields, "quick_gelu"), (Part("embedding", embedding), Part("norms", norms)))


def siglip_tower(fields: Fields, name: str = "vision") -> Tower:
    """SigLIP's: patches with bias, no class token, and an attention-pooling head unless `vision_use_head` is false."""
    inputs, count = patches(fields)
    h = dim("h", fields.size("hidden_size"))
    embedding = (
        *linear("patch", "patch_embedding", h, inputs, bias=True),
        Weight("position", (dim("n", count), h)),
    )
    parts = [Part("embedding", embedding), Part("norms", Norm("post_norm", h, **LAYER_NORM).weights)]
    if fields.flag("vision_use_head", default=True) if fields.has("vision_use_head") else True:
        f = dim("f", fields.size("intermediate_size"))
        head = (
            Weight("probe", (h,)),
            *linear("input", "in_proj", dim("3", 3) * h, h, bias=True),
            *linear("output", "out_proj", h, h, bias=True),
            *Norm("norm", h, **LAYER_NORM).weights,
            *linear("up", "fc1", f, h, bias=True),
            *linear("down", "fc2", h, f, bias=True),
        )
        parts.append(Part("pooling_head", head))
    return Tower(name, _clip_stack(fields, "gelu_pytorch_tanh"), tuple(parts))


def qwen_tower(fields: Fields, hidden_size: int, deepstack: bool = True) -> Tower:
    """Qwen3-VL's and Qwen3.5's: patches of two frames, learned positions, mergers that join 2 x 2 patches into one token."""
    width, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    depth = fields.size("depth", high=4096)
    patch, frames = fields.size("patch_size"), fields.size("temporal_patch_size")
    out = fields.size("out_hidden_size")
    if out != hidden_size:
        raise InputError.of(
            fields.name("out_hidden_size"), out, f"it must equal text_config.hidden_size ({hidden_size})"
        )
    h, p = dim("h", width), dim("p", patch)
    inputs = dim("c", fields.size("in_channels")) * dim("t", frames) * p * p
    modules = ("qkv", "qkv", "qkv", "proj", "linear_fc1", "linear_fc2")
    layer = vit_layer(
        width,
        fields.size("num_heads"),
        inner,
        fields.text("hidden_act", default="gelu_pytorch_tanh"),
        modules,
        fused=True,
    )
    merge = fields.size("spatial_merge_size", high=64)
    joined = dim("m", merge * merge) * h

    def merger(name: str, norm: Dim, copies: int = 1) -> Part:
        weights = (
            *Norm("norm", norm, **LAYER_NORM).weights,
            *linear("up", "linear_fc1", joined, joined, bias=True),
            *linear("down", "linear_fc2", dim("h_t", out), joined, bias=True),
        )
        return Part(name, weights, copies, copies)

    positions = Weight("position", (dim("n", fields.size("num_position_embeddings")), h))
    parts = [Part("embedding", (*linear("patch", "proj", h, inputs, bias=True), positions)), merger("merger", h)]
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
