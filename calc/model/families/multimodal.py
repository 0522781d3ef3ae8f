"""Language models with a vision encoder beside them, and CLIP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from calc.errors import InputError
from calc.model.defaults import class_defaults
from calc.model.families import decoders, gemma4, hybrid, mixtures
from calc.model.families.base import Family
from calc.model.families.common import LAYER_NORM, hidden, storage_dtype, uniform
from calc.model.families.towers import CLIP, clip_tower, gemma4_tower, qwen_tower, siglip_tower, vit_layer
from calc.model.fields import Fields
from calc.model.spec import ModelSpec, Tower
from calc.model.weights import Norm, Part, Split, Weight, dim, linear

Reader = Callable[[Fields], ModelSpec]

# text_config.model_type -> (the class that reads it, its reader)
_TEXT: dict[str, tuple[str, Reader]] = {
    "llama": ("LlamaForCausalLM", decoders.llama),
    "mistral": ("MistralForCausalLM", decoders.mistral),
    "qwen2": ("Qwen2ForCausalLM", decoders.qwen2),
    "qwen3": ("Qwen3ForCausalLM", decoders.qwen3),
}
_VISION = {"clip_vision_model": clip_tower, "siglip_vision_model": siglip_tower}


def with_text(fields: Fields, read: Reader, text: Fields, tied: bool, towers: tuple[Tower, ...]) -> ModelSpec:
    """The language model of `text`, with the parent's tied head and its towers. The parent's flag is the one that counts."""
    outer = fields.flag("tie_word_embeddings", default=tied)
    text.data = {**text.data, "tie_word_embeddings": outer}
    spec = read(text)
    kind = storage_dtype(fields) if fields.has("dtype", "torch_dtype") else spec.dtype
    return replace(spec, towers=(*spec.towers, *towers), dtype=kind)


def _named(fields: Fields, section: str, known: dict[str, Any]) -> Any:
    data = fields.data.get(section)
    name = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in known:
        raise InputError.of(f"{section}.model_type", name, f"it must be one of {', '.join(known)}")
    return known[name]


def llava(fields: Fields) -> ModelSpec:
    """LLaVA: a two-layer projector between the vision encoder and the language model."""
    architecture, read = _named(fields, "text_config", _TEXT)
    tower_of = _named(fields, "vision_config", _VISION)
    text = fields.section("text_config", defaults=class_defaults()[architecture][""])
    tower = tower_of(fields.section("vision_config"))
    layers = fields.data.get("vision_feature_layer", -2)
    inputs = dim("h_v", tower.stack.kinds[0].mixer.hidden_size * (len(layers) if isinstance(layers, list) else 1))
    has_bias = fields.flag("multimodal_projector_bias", default=True)
    h = dim("h", hidden(text))
    projector = (
        *linear("up", "linear_1", h, inputs, bias=has_bias),
        *linear("down", "linear_2", h, h, bias=has_bias),
    )
    fields.ignore("ignore_index", "vision_feature_layer", "vision_feature_select_strategy", "projector_hidden_act")
    fields.ignore("vocab_size", "image_seq_length")
    vision = replace(tower, parts=(*tower.parts, Part("projector", projector)))
    inner = text.flag("tie_word_embeddings", default=False)  # older configs say it here
    if inner:
        fields.data = {**fields.data, "tie_word_embeddings": True}
    return with_text(fields, read, text, False, (vision,))


def _qwen_vl(read: Reader, deepstack: bool = True) -> Reader:
    def reader(fields: Fields) -> ModelSpec:
        text = fields.section("text_config")
        tower = qwen_tower(fields.section("vision_config"), hidden(text), deepstack)
        return with_text(fields, read, text, False, (tower,))

    return reader


def gemma3(fields: Fields) -> ModelSpec:
    text, vision = fields.section("text_config"), fields.section("vision_config")
    tower = siglip_tower(vision)
    width = dim("h_v", vision.size("hidden_size"))
    projector = (
        Weight("projection", (width, dim("h", hidden(text))), matmul=True),
        *Norm("norm", width, style="gemma").weights,
    )
    fields.ignore("mm_tokens_per_image", "boi_token_index", "eoi_token_index")
    vision_tower = replace(tower, parts=(*tower.parts, Part("projector", projector)))
    return with_text(fields, decoders.gemma3, text, True, (vision_tower,))


def gemma4_model(fields: Fields) -> ModelSpec:
    text = fields.section("text_config")
    towers: tuple[Tower, ...] = ()
    if fields.has("vision_config"):
        towers = (gemma4_tower(fields.section("vision_config"), hidden(text)),)
    if fields.has("audio_config"):
        raise InputError.of("audio_config", fields.data["audio_config"], "the audio encoder is not understood; null is")
    fields.ignore("audio_config", "vision_config", "vision_soft_tokens_per_image", "eoa_token_index")
    fields.ignore("boa_token_id", "eoa_token_id")
    return with_text(fields, gemma4.gemma4, text, True, towers)


def clip(fields: Fields) -> ModelSpec:
    """CLIP: a causal text encoder and a vision encoder, each with a projection into the shared space."""
    text, vision = fields.section("text_config"), fields.section("vision_config")
    width, inner = text.size("hidden_size"), text.size("intermediate_size")
    activation = text.text("hidden_act", default="quick_gelu")
    layer = vit_layer(width, text.size("num_attention_heads"), inner, activation, CLIP, causal=True)
    h, shared = dim("h", width), dim("h_p", fields.size("projection_dim"))
    positions = text.size("max_position_embeddings")
    token = Weight("token", (dim("V", text.size("vocab_size")), h), Split.VOCAB, "token_embedding")
    projections = (
        *linear("text", "text_projection", shared, h),
        *linear("vision", "visual_projection", shared, dim("h_v", vision.size("hidden_size"))),
        Weight("logit_scale", (dim("1", 1),)),
    )
    fields.ignore("text_config_dict", "vision_config_dict", "logit_scale_init_value")
    text.ignore("projection_dim", "dropout", "layer_norm_eps", "attention_dropout")
    return ModelSpec(
        name="",
        architecture="",
        hidden_size=width,
        vocab_size=text.size("vocab_size"),
        max_position_embeddings=positions,
        layers=uniform(text, layer),
        embeddings=(token, Weight("position", (dim("s_{max}", positions), h))),
        final_norm=Norm("weight", h, **LAYER_NORM),
        head=(),
        tied=False,
        source="",
        has_head=False,
        other=(Part("projections", projections),),
        towers=(clip_tower(vision),),
        dtype=storage_dtype(fields),
    )


FAMILIES = {
    "LlavaForConditionalGeneration": Family(llava, "llava"),
    "Qwen3VLForConditionalGeneration": Family(_qwen_vl(decoders.qwen3), "qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": Family(_qwen_vl(mixtures.qwen3_moe), "qwen3_vl_moe"),
    "Qwen3_5ForConditionalGeneration": Family(_qwen_vl(hybrid.qwen3_5, deepstack=False), "qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": Family(_qwen_vl(hybrid.qwen3_5_moe, deepstack=False), "qwen3_5_moe"),
    "Gemma3ForConditionalGeneration": Family(gemma3, "gemma3"),
    "Gemma4ForConditionalGeneration": Family(gemma4_model, "gemma4"),
    "CLIPModel": Family(clip, "clip"),
}
