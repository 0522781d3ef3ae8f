"""Encoders of pictures that stand alone, and CLIP and SigLIP, which compare pictures with text."""

from __future__ import annotations

from dataclasses import replace

from calc.model.families.base import Family
from calc.model.families.common import LAYER_NORM, encoder_alone, storage_dtype, uniform
from calc.model.families.rotary_vision_towers import pixtral_tower
from calc.model.families.vision_towers import CLIP, clip_tower, patches, siglip_tower, vit_layer
from calc.model.fields import Fields
from calc.model.spec import ModelSpec, Tower
from calc.model.weights import Norm, Part, Split, Weight, convolution, dim, linear


def _text(fields: Fields, activation: str, causal: bool) -> ModelSpec:
    """The text encoder of CLIP or SigLIP: learned positions, a norm at the end, no head over the vocabulary."""
    width, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    activation = fields.text("hidden_act", default=activation)
    layer = vit_layer(width, fields.size("num_attention_heads"), inner, activation, CLIP, causal=causal)
    h, positions, vocab = dim("h", width), fields.size("max_position_embeddings"), fields.size("vocab_size")
    token = Weight("token", (dim("V", vocab), h), Split.VOCAB, "token_embedding")
    fields.ignore("projection_dim", "dropout", "layer_norm_eps", "attention_dropout")
    return ModelSpec(
        name="",
        architecture="",
        hidden_size=width,
        vocab_size=vocab,
        max_position_embeddings=positions,
        layers=uniform(fields, layer),
        embeddings=(token, Weight("position", (dim("s_{max}", positions), h))),
        final_norm=Norm("weight", h, **LAYER_NORM),
        head=(),
        tied=False,
        source="",
        has_head=False,
        dtype=storage_dtype(fields),
    )


def clip_text(fields: Fields) -> ModelSpec:
    return _text(fields, "quick_gelu", causal=True)


def clip(fields: Fields) -> ModelSpec:
    """CLIP: a causal text encoder and a vision encoder, each with a projection into the shared space."""
    text, vision = fields.section("text_config"), fields.section("vision_config")
    spec, shared = clip_text(text), dim("h_p", fields.size("projection_dim"))
    projections = (
        *linear("text", "text_projection", shared, dim("h", spec.hidden_size)),
        *linear("vision", "visual_projection", shared, dim("h_v", vision.size("hidden_size"))),
        Weight("logit_scale", (dim("1", 1),)),
    )
    fields.ignore("text_config_dict", "vision_config_dict", "logit_scale_init_value")
    dtype, other = storage_dtype(fields), (Part("projections", projections),)
    return replace(spec, other=other, towers=(clip_tower(vision),), dtype=dtype)


def siglip(fields: Fields) -> ModelSpec:
    """SigLIP: two encoders that share a space without projections, but the text's own; a scale and a bias of the logits."""
    text, vision = fields.section("text_config"), fields.section("vision_config")
    spec, one = _text(text, "gelu_pytorch_tanh", causal=False), dim("1", 1)
    h = dim("h", spec.hidden_size)
    out = dim("h_p", text.size_or_none("projection_size") or h.size)
    projections = (
        *linear("text", "head", out, h, bias=True),
        Weight("logit_scale", (one,)),
        Weight("logit_bias", (one,)),
    )
    dtype, other = storage_dtype(fields), (Part("projections", projections),)
    return replace(spec, other=other, towers=(siglip_tower(vision),), dtype=dtype)


def vit(fields: Fields, classes: bool = False) -> ModelSpec:
    """ViT (arXiv 2010.11929): a class token and learned positions; ends in a pooler, or in a layer over the classes."""
    width = fields.size("hidden_size")
    inputs, count = patches(fields)
    h = dim("h", width)
    letters = "qkvo" if fields.flag("qkv_bias", default=True) else "o"
    layer = vit_layer(
        width,
        fields.size("num_attention_heads"),
        fields.size("intermediate_size"),
        fields.text("hidden_act", default="gelu"),
        ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"),
        letters,
    )
    embedding = (
        Weight("class", (h,)),
        *convolution("patch", "projection", h, inputs, bias=True),
        Weight("position", (dim("n", count + 1), h)),
    )
    labels = fields.data.get("id2label")
    named = len(labels) if isinstance(labels, dict) else 2  # two where the config names none
    out = dim("C", named) if classes else dim("h_o", fields.size_or_none("pooler_output_size") or width)
    last = Part(
        "classifier" if classes else "pooler", linear("output", "classifier", out, h, bias=True) if out.size else ()
    )
    fields.ignore("encoder_stride", "pooler_act", "pooler_output_size", "num_labels")
    parts = (Part("embedding", embedding), Part("norms", Norm("final_norm", h, **LAYER_NORM).weights))
    return encoder_alone(fields, Tower("vision", uniform(fields, layer), parts), last)


FAMILIES = {
    "CLIPModel": Family(clip, "clip"),
    "CLIPTextModel": Family(clip_text, "clip"),
    "CLIPVisionModel": Family(lambda fields: encoder_alone(fields, clip_tower(fields)), "clip"),
    "SiglipModel": Family(siglip, "siglip"),
    "SiglipVisionModel": Family(lambda fields: encoder_alone(fields, siglip_tower(fields)), "siglip"),
    "PixtralVisionModel": Family(lambda fields: encoder_alone(fields, pixtral_tower(fields)), "pixtral"),
    "ViTModel": Family(vit, "vit"),
    "ViTForImageClassification": Family(lambda fields: vit(fields, classes=True), "vit"),
}
