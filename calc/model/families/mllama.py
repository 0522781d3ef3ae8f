"""Llama 3.2 Vision (Mllama): layers between Llama's that attend to a picture and to nothing else."""

from __future__ import annotations

from dataclasses import replace

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import LAYER_NORM, assemble, attention, mlp, norms, num_layers, whole_heads
from calc.model.families.vision_towers import CLIP, patches, vit_layer
from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec, Stack, Tower
from calc.model.weights import Norm, Part, Weight, convolution, dim, linear

_CROSS = [3, 8, 13, 18, 23, 28, 33, 38]
_ASPECTS = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
_ONE = (dim("1", 1),)


def _gates(*names: str) -> tuple[Part, ...]:
    return (Part("gates", tuple(Weight(name, _ONE) for name in names)),)


def _text(fields: Fields, pictures: Fields) -> ModelSpec:
    """Llama's layers, and those of `cross_attention_layers`, which a text without a picture passes by."""
    count = num_layers(fields)
    given = fields.items("cross_attention_layers") or _CROSS
    if not all(isinstance(at, int) and not isinstance(at, bool) for at in given):
        raise InputError.of(fields.name("cross_attention_layers"), given, "each must be the number of a layer")
    cross = len({at for at in given if 0 <= at < count})
    if cross == count:
        raise InputError.of(fields.name("cross_attention_layers"), given, "one layer at least must read the text")
    heads, _, size = whole_heads(fields)
    kv = fields.size("num_key_value_heads", default=heads)
    fields.divides("num_key_value_heads", kv, "num_attention_heads", heads)
    sizes = (heads, kv, size)
    layer = Layer("layer", attention(fields, sizes=sizes), mlp(fields), norms(fields))
    sight = attention(fields, "head", sizes=sizes, causal=False, rotary=False)
    picture = Layer("layer", None, mlp(fields), norms(fields), cross=sight, extra=_gates("attention", "mlp"))
    fields.ignore("dropout", "cross_attention_layers")
    seen = pictures.size("max_num_tiles", high=4096) * (patches(pictures)[1] + 1)
    note = (
        f"a picture adds {cross} layers that attend to it and keep keys and values of its {seen:,} tokens, "
        f"{2 * kv * size * seen * cross:,} numbers in all; text alone passes them by"
    )
    return replace(
        assemble(
            fields,
            Stack((layer,), (0,) * (count - cross)),
            never_tied=True,
            rows=dim("V", fields.size("vocab_size")) + dim("8", 8),
        ),
        towers=(Tower("picture_layers", Stack((picture,), (0,) * cross)),),
        assumptions=(note,),
    )


def _tower(fields: Fields) -> Tower:
    """A vision transformer over tiles, then one over all of them whose halves are gated; tables for each shape of tiles."""
    width, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    inputs, count = patches(fields)
    activation = fields.text("hidden_act", default="gelu")
    heads = fields.size("attention_heads", "num_attention_heads")
    modules = (*CLIP[:3], "o_proj", *CLIP[4:])
    local = replace(vit_layer(width, heads, inner, activation, modules, ""), kind="local")
    whole = replace(local, kind="global", extra=_gates("attention", "mlp"))
    depth, last = fields.size("num_hidden_layers", high=4096), fields.size("num_global_layers", high=4096)
    shapes = fields.items("supported_aspect_ratios") or _ASPECTS
    fields.ignore("supported_aspect_ratios", "intermediate_layers_indices", "norm_eps", "return_dict")
    h, ids, tiles = dim("h", width), dim("n_a", len(shapes) + 1), dim("n_t", fields.size("max_num_tiles", high=4096))
    positions = dim("n", count + 1)
    embedding = (
        Weight("class", (h,)),
        *convolution("patch", "patch_embedding", h, inputs),
        Weight("position", (positions, h)),
        Weight("tile_position", (ids, tiles * positions * h)),
        Weight("pre_tile", (ids, tiles * h)),
        Weight("post_tile", (ids, tiles * h)),
        *(Weight(f"{name}_gate", _ONE) for name in ("position", "pre_tile", "post_tile")),
    )
    edge = (*Norm("pre_norm", h, **LAYER_NORM).weights, *Norm("post_norm", h, **LAYER_NORM).weights)
    stack = Stack((local, whole), (0,) * depth + (1,) * last)
    return Tower("vision", stack, (Part("embedding", embedding), Part("norms", edge)))


def mllama(fields: Fields) -> ModelSpec:
    text, vision = fields.section("text_config"), fields.section("vision_config")
    tower = _tower(vision)
    spec = _text(text, vision)
    out = dim("h_o", vision.size("vision_output_dim"))
    projector = linear("projection", "multi_modal_projector", dim("h", spec.hidden_size), out, bias=True)
    fields.ignore("tie_word_embeddings")
    return replace(spec, towers=(*spec.towers, replace(tower, parts=(*tower.parts, Part("projector", projector)))))


FAMILIES = {"MllamaForConditionalGeneration": Family(mllama, "mllama")}
