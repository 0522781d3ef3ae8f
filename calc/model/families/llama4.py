"""Llama 4: attention in chunks on three layers of four, experts with one always on, a vision encoder."""

from __future__ import annotations

from dataclasses import replace

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import (
    LAYER_NORM,
    assemble,
    attention,
    bias,
    combined,
    dropouts,
    hidden,
    layer_types,
    mlp,
    moe,
    norms,
    num_layers,
    uniform,
)
from calc.model.families.vision_language import with_text
from calc.model.families.vision_towers import patches, vit_layer
from calc.model.feed_forward import MLP, MoE, router
from calc.model.fields import Fields
from calc.model.mixers import Attention
from calc.model.spec import ModelSpec, Tower
from calc.model.weights import Norm, Part, Weight, dim, linear

_KINDS = {"full_attention": "full", "chunked_attention": "chunked"}


def _rotating(fields: Fields) -> list[bool]:
    """Which layers rotate: `no_rope_layers` says 1 for those that do."""
    count = num_layers(fields)
    every = fields.size("no_rope_layer_interval", default=4)
    flags = fields.items("no_rope_layers") or [int((at + 1) % every != 0) for at in range(count)]
    if len(flags) != count:
        raise InputError.of("no_rope_layers", flags, f"it must be a list of {count}, one for each layer")
    return [bool(flag) for flag in flags]


def _sparse_layers(fields: Fields) -> list[str]:
    count = num_layers(fields)
    step = fields.size("interleave_moe_layer_step", default=1)
    chosen = fields.items("moe_layers")
    numbers = set(range(step - 1, count, step)) if chosen is None else {at for at in chosen if isinstance(at, int)}
    return ["moe" if at in numbers else "dense" for at in range(count)]


def _routed(fields: Fields, shared: MLP) -> MoE:
    """The mixture; this class's router is a linear layer of its own."""
    made = moe(fields, ("num_local_experts",), ("intermediate_size",), shared)
    return replace(made, router=router(hidden(fields), made.num_experts, module="router"))


def llama4(fields: Fields) -> ModelSpec:
    chunk = fields.size_or_none("attention_chunk_size") or 0
    default = ["chunked" if rotates and chunk else "full" for rotates in _rotating(fields)]
    kinds = layer_types(fields, _KINDS, default)
    letters = bias(fields)

    def mixer(size: int) -> Attention:
        return attention(fields, bias=letters, chunk=size, rotary=bool(size))

    shared = mlp(fields, letter="f_s")
    layers = combined(
        {"full": lambda: mixer(0), "chunked": lambda: mixer(chunk)},
        kinds,
        {
            "moe": lambda: _routed(fields, shared),
            "dense": lambda: mlp(fields, "intermediate_size_mlp"),
        },
        _sparse_layers(fields),
        norms(fields),
    )
    fields.ignore("intermediate_size_mlp", "use_qk_norm", "attn_temperature_tuning", "floor_scale", "attn_scale")
    return assemble(fields, layers, dropout=dropouts(fields, attention="attention_dropout"))


def _tower(fields: Fields, hidden_size: int) -> Tower:
    """A vision transformer with a class token, a pixel shuffle and two projections."""
    inputs, count = patches(fields)
    width, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    middle, out = fields.size("projector_input_dim"), fields.size("projector_output_dim")
    output = fields.size("vision_output_dim")
    if fields.data and output != out:  # the class's own default disagrees with itself
        raise InputError.of(fields.name("vision_output_dim"), output, f"it must equal projector_output_dim ({out})")
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")
    layer = vit_layer(width, fields.size("num_attention_heads"), inner, "gelu", modules, rotary=True)
    h, o = dim("h", width), dim("h_o", out)
    embedding = (
        *linear("patch", "linear", h, inputs),
        Weight("class", (h,)),
        Weight("position", (dim("n", count + 1), h)),
    )
    edge = (*Norm("pre_norm", h, **LAYER_NORM).weights, *Norm("post_norm", h, **LAYER_NORM).weights)
    projector = (
        *linear("up", "fc1", dim("h_i", middle), dim("f", inner)),
        *linear("down", "fc2", o, o),
        *linear("output", "linear_1", dim("h_t", hidden_size), dim("h_p", output)),
    )
    for key in ("hidden_act", "pixel_shuffle_ratio", "projector_dropout", "vision_feature_layer"):
        fields.ignore(key)
    fields.ignore("vision_feature_select_strategy", "multi_modal_projector_bias", "attention_dropout")
    parts = (Part("embedding", embedding), Part("norms", edge), Part("projector", projector))
    return Tower("vision", uniform(fields, layer), parts)


def llama4_vision(fields: Fields) -> ModelSpec:
    text = fields.section("text_config")
    tower = _tower(fields.section("vision_config"), hidden(text))
    fields.ignore("boi_token_index", "eoi_token_index")
    return with_text(fields, llama4, text, False, (tower,))


FAMILIES = {
    "Llama4ForCausalLM": Family(llama4, "llama4"),
    "Llama4ForConditionalGeneration": Family(llama4_vision, "llama4"),
}
