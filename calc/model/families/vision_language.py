"""Language models with a vision encoder: each is an encoder, a projector and a family of text models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from calc.errors import InputError
from calc.model.defaults import class_defaults
from calc.model.families import (
    deepseek_mla,
    gemma4,
    llama_qwen_gemma_phi,
    llama_variants,
    mamba_hybrids,
    mixtral_qwen3_moe_gpt_oss,
    qwen2_moe_glm_moe,
)
from calc.model.families.base import Family
from calc.model.families.common import LAYER_NORM, hidden, storage_dtype
from calc.model.families.rotary_vision_towers import glm4v_tower, kimi_tower, pixtral_tower, qwen2_5_tower, qwen2_tower
from calc.model.families.vision_towers import clip_tower, gemma4_tower, internvl_tower, qwen_tower, siglip_tower
from calc.model.fields import Fields
from calc.model.mixers import Attention
from calc.model.spec import ModelSpec, Tower
from calc.model.weights import Dim, Norm, Part, Weight, dim, linear

Reader = Callable[[Fields], ModelSpec]
Projector = Callable[[Fields, Dim, Dim], tuple[Weight, ...]]  # config, the language model's width, the encoder's

# text_config.model_type -> the class that reads it
_TEXT_FAMILIES = (
    llama_qwen_gemma_phi.FAMILIES | llama_variants.FAMILIES | mixtral_qwen3_moe_gpt_oss.FAMILIES | deepseek_mla.FAMILIES
)
_TEXT = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# vision_config.model_type -> (the class that reads it, its encoder)
_VISION: dict[str, tuple[str, Callable[[Fields], Tower]]] = {
    "clip_vision_model": ("CLIPVisionModel", clip_tower),
    "siglip_vision_model": ("SiglipVisionModel", siglip_tower),
    "pixtral": ("PixtralVisionModel", pixtral_tower),
}


def with_text(fields: Fields, read: Reader, text: Fields, tied: bool, towers: tuple[Tower, ...]) -> ModelSpec:
    """The language model of `text`, with the parent's tied head and its towers. The parent's flag is the one that counts."""
    outer = fields.flag("tie_word_embeddings", default=tied)
    text.data = {**text.data, "tie_word_embeddings": outer}
    spec = read(text)
    kind = storage_dtype(fields) if fields.has("dtype", "torch_dtype") else spec.dtype
    return replace(spec, towers=(*spec.towers, *towers), dtype=kind)


def _named(fields: Fields, section: str, known: Mapping[str, Any], default: str) -> Any:
    """What `known` holds for the section's model_type, `default` where it names none."""
    data = fields.data.get(section)
    name = data.get("model_type", default) if isinstance(data, dict) else default
    if not isinstance(name, str) or name not in known:
        raise InputError.of(f"{section}.model_type", name, f"it must be one of {', '.join(known)}")
    return known[name]


def _inner_tie(fields: Fields, text: Fields) -> None:
    """Older configs tell in the text's section that the head is tied; these classes heed it."""
    if text.flag("tie_word_embeddings", default=False):
        fields.data = {**fields.data, "tie_word_embeddings": True}


def llava_like(
    projector: Projector,
    text_type: str = "llama",
    vision_type: str = "clip_vision_model",
    tied: bool = False,
    inner_tie: bool = False,
    own_vision: Callable[[Fields], Tower] | None = None,
    newline: bool = False,
) -> Reader:
    """The reader of a model whose parts are named by the model types of its sections. `own_vision`: the class knows one encoder
    alone. `newline`: a learned vector ends each row of patches."""

    def read(fields: Fields) -> ModelSpec:
        architecture = _named(fields, "text_config", _TEXT, text_type)
        text = fields.section("text_config", defaults=class_defaults()[architecture][""])
        if own_vision:
            tower = own_vision(fields.section("vision_config"))
        else:
            vision_class, tower_of = _named(fields, "vision_config", _VISION, vision_type)
            defaults = class_defaults()[vision_class][""]
            tower = tower_of(fields.section("vision_config", defaults=defaults))
        mixer = tower.stack.kinds[0].mixer
        assert isinstance(mixer, Attention)  # every encoder's layer attends
        h = dim("h", hidden(text))
        parts = [*tower.parts, Part("projector", projector(fields, h, dim("h_v", mixer.hidden_size)))]
        if newline:
            parts.append(Part("image_newline", (Weight("newline", (h,)),)))
        if inner_tie:
            _inner_tie(fields, text)
        fields.ignore("projector_hidden_act", "vision_feature_select_strategy", "vocab_size", "image_seq_length")
        fields.ignore("ignore_index", "image_grid_pinpoints", "use_image_newline_parameter", "vision_aspect_ratio")
        fields.ignore(
            "hidden_size",
            "image_split_resolution",
            "alignment_activation_fn",
            "max_splits_per_img",
            "projector_layernorm_eps",
            "adapter_layer_norm_eps",
        )
        fields.ignore(
            "num_image_tokens",
            "video_token_index",
            "video_seq_length",
            "spatial_pool_mode",
            "spatial_pool_stride",
            "projection_layer_norm_eps",
        )
        fields.ignore("_pad_token_id")
        text.ignore("num_image_tokens", "logit_scale")
        return with_text(fields, _TEXT_FAMILIES[architecture].read, text, tied, (replace(tower, parts=tuple(parts)),))

    return read


def _seen(fields: Fields, width: Dim) -> Dim:
    """The features of all encoder layers that the projector reads, one or a list of them."""
    layers = fields.data.get("vision_feature_layer", fields.defaults.get("vision_feature_layer"))
    fields.ignore("vision_feature_layer", "vision_feature_layers")
    return dim("n_f", len(layers)) * width if isinstance(layers, list) and len(layers) > 1 else width


def _square(fields: Fields, key: str, width: Dim) -> Dim:
    """The features of a square of patches that becomes one token."""
    side = fields.size(key, default=2, high=64)
    return dim("m", side * side) * width


def _two_layers(h: Dim, inputs: Dim, bias: bool = True) -> tuple[Weight, ...]:
    return (*linear("up", "linear_1", h, inputs, bias=bias), *linear("down", "linear_2", h, h, bias=bias))


def _llava(fields: Fields, h: Dim, width: Dim) -> tuple[Weight, ...]:
    return _two_layers(h, _seen(fields, width), fields.flag("multimodal_projector_bias", default=True))


def _vip(fields: Fields, h: Dim, width: Dim) -> tuple[Weight, ...]:
    inputs = _seen(fields, width)
    return (*Norm("norm", inputs, **LAYER_NORM).weights, *_two_layers(h, inputs))


def _mistral3(fields: Fields, h: Dim, width: Dim) -> tuple[Weight, ...]:
    has_bias = fields.flag("multimodal_projector_bias", default=False)
    merger = linear("merger", "merging_layer", width, _square(fields, "spatial_merge_size", width))
    return (*Norm("norm", width).weights, *merger, *_two_layers(h, _seen(fields, width), has_bias))


def _paligemma(fields: Fields, h: Dim, width: Dim) -> tuple[Weight, ...]:
    out = fields.size("projection_dim", default=2048)
    if out != h.size:
        raise InputError.of("projection_dim", out, f"it must equal text_config.hidden_size ({h.size})")
    return linear("projection", "linear", h, width, bias=True)


def _idefics3(fields: Fields, h: Dim, width: Dim) -> tuple[Weight, ...]:
    return linear("projection", "proj", h, _square(fields, "scale_factor", width))


def _internvl(fields: Fields, h: Dim, width: Dim) -> tuple[Weight, ...]:
    ratio = fields.number("downsample_ratio", default=0.5, low=0.01, high=1.0)
    inputs = dim("m", int(1 / ratio) ** 2) * width
    fields.ignore("vision_feature_layer")
    return (*Norm("norm", inputs, **LAYER_NORM).weights, *_two_layers(h, inputs))


def _halved(fields: Fields, h: Dim, inputs: Dim, middle: int) -> tuple[Weight, ...]:
    """A gated projector: the first layer's output is gate and value."""
    if middle % 2:
        raise InputError.of("alignment_intermediate_size", middle, "it must be even")
    fields.ignore("vision_feature_layer")
    return (
        *linear("up", "linear_1", dim("f_p", middle), inputs, bias=True),
        *linear("down", "linear_2", h, dim("f_{p2}", middle // 2), bias=True),
    )


def _aya(fields: Fields, h: Dim, width: Dim) -> tuple[Weight, ...]:
    inputs = _square(fields, "downsample_factor", width)
    middle = fields.size_or_none("alignment_intermediate_size") or h.size
    return (*Norm("norm", inputs, **LAYER_NORM).weights, *_halved(fields, h, inputs, middle))


def _cohere2(fields: Fields, h: Dim, width: Dim) -> tuple[Weight, ...]:
    middle = fields.size("alignment_intermediate_size", default=36864)
    return _halved(fields, h, _square(fields, "downsample_factor", width), middle)


def _kimi(fields: Fields, h: Dim, width: Dim) -> tuple[Weight, ...]:
    kernel = fields.data["vision_config"].get("merge_kernel_size", [2, 2])  # the encoder's section has been read
    fields.sections[-1].ignore("merge_kernel_size")
    if kernel != [2, 2]:
        raise InputError.of("vision_config.merge_kernel_size", kernel, "only [2, 2] is understood")
    if (size := fields.size("projection_hidden_size", default=1152)) != width.size:
        raise InputError.of("projection_hidden_size", size, f"it must equal vision_config.hidden_size ({width.size})")
    joined = dim("m", 4) * width
    return (
        *Norm("norm", width, **LAYER_NORM).weights,
        *linear("up", "in_proj", joined, joined, bias=True),
        *linear("down", "out_proj", h, joined, bias=True),
    )


def qwen_vl(read: Reader, tower_of: Callable[[Fields, int], Tower], inner_tie: bool = False) -> Reader:
    """Qwen's and GLM's: one encoder that ends in a merger. Qwen2-VL's configs hold the text's fields at the top."""

    def reader(fields: Fields) -> ModelSpec:
        text = fields.section("text_config") if fields.has("text_config") else _flat_text(fields)
        tower = tower_of(fields.section("vision_config"), hidden(text))
        if inner_tie and fields.has("text_config"):
            _inner_tie(fields, text)
        fields.ignore("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")
        fields.ignore("vision_token_id")
        return with_text(fields, read, text, False, (tower,))

    return reader


def _flat_text(fields: Fields) -> Fields:
    """The text's fields where they stand at the top of the config."""
    own = {"vision_config", "text_config", "tie_word_embeddings"}
    text = Fields({key: value for key, value in fields.data.items() if key not in own}, "", fields)
    text.defaults = fields.class_defaults.get("text_config", {})
    fields.ignore(*text.data)
    fields.sections.append(text)
    return text


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
    return with_text(fields, llama_qwen_gemma_phi.gemma3, text, True, (vision_tower,))


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


_GLM4V = llama_variants.dense(
    llama_variants.Traits(
        bias="qkv", bias_flag="", mlp={"modules": llama_variants.FUSED_MLP}, norms=llama_variants.SANDWICH
    )
)
_idefics_tower = partial(siglip_tower, head=False)
_SIGLIP = "siglip_vision_model"

FAMILIES = {
    "LlavaForConditionalGeneration": Family(llava_like(_llava, inner_tie=True), "llava"),
    "LlavaNextForConditionalGeneration": Family(llava_like(_llava, newline=True), "llava_next"),
    "LlavaNextVideoForConditionalGeneration": Family(
        llava_like(_llava, inner_tie=True, newline=True), "llava_next_video"
    ),
    "LlavaOnevisionForConditionalGeneration": Family(
        llava_like(_llava, "qwen2", _SIGLIP, inner_tie=True, newline=True), "llava_onevision"
    ),
    "VipLlavaForConditionalGeneration": Family(llava_like(_vip), "vipllava"),
    "Mistral3ForConditionalGeneration": Family(llava_like(_mistral3, "mistral", "pixtral", tied=True), "mistral3"),
    "PaliGemmaForConditionalGeneration": Family(llava_like(_paligemma, "gemma", _SIGLIP, tied=True), "paligemma"),
    "Idefics3ForConditionalGeneration": Family(llava_like(_idefics3, own_vision=_idefics_tower), "idefics3"),
    "SmolVLMForConditionalGeneration": Family(llava_like(_idefics3, own_vision=_idefics_tower), "smolvlm"),
    "InternVLForConditionalGeneration": Family(
        llava_like(_internvl, "qwen2", tied=True, own_vision=internvl_tower), "internvl"
    ),
    "AyaVisionForConditionalGeneration": Family(llava_like(_aya, "cohere2", _SIGLIP, tied=True), "aya_vision"),
    "Cohere2VisionForConditionalGeneration": Family(
        llava_like(_cohere2, "cohere2", _SIGLIP, tied=True), "cohere2_vision"
    ),
    "Kimi_K25ForConditionalGeneration": Family(
        llava_like(_kimi, "deepseek_v3", tied=True, own_vision=kimi_tower), "kimi_k25"
    ),
    "Qwen2VLForConditionalGeneration": Family(
        qwen_vl(llama_qwen_gemma_phi.qwen2, qwen2_tower, inner_tie=True), "qwen2_vl"
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        qwen_vl(llama_qwen_gemma_phi.qwen2, qwen2_5_tower, inner_tie=True), "qwen2_5_vl"
    ),
    "Qwen3VLForConditionalGeneration": Family(qwen_vl(llama_qwen_gemma_phi.qwen3, qwen_tower), "qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": Family(
        qwen_vl(mixtral_qwen3_moe_gpt_oss.qwen3_moe, qwen_tower), "qwen3_vl_moe"
    ),
    "Qwen3_5ForConditionalGeneration": Family(
        qwen_vl(mamba_hybrids.qwen3_5, partial(qwen_tower, deepstack=False)), "qwen3_5"
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        qwen_vl(mamba_hybrids.qwen3_5_moe, partial(qwen_tower, deepstack=False)), "qwen3_5_moe"
    ),
    "Glm4vForConditionalGeneration": Family(qwen_vl(_GLM4V, glm4v_tower, inner_tie=True), "glm4v"),
    "Glm4vMoeForConditionalGeneration": Family(
        qwen_vl(qwen2_moe_glm_moe.glm4_moe, glm4v_tower, inner_tie=True), "glm4v_moe"
    ),
    "Gemma3ForConditionalGeneration": Family(gemma3, "gemma3"),
    "Gemma4ForConditionalGeneration": Family(gemma4_model, "gemma4"),
}
