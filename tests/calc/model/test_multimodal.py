"""Models that see or hear: every class of transformers that takes a picture and text is counted exactly or refused."""

from __future__ import annotations

from typing import Any

import pytest

from calc.catalogue import catalogue, load, load_config
from calc.errors import InputError
from calc.model.config import from_config
from calc.parameters import parameters
from calc.training import TrainingPlan, train
from tests.calc.model.meta_model import build, count

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
SIGLIP = CLIP | {"model_type": "siglip_vision_model"}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "head_dim": 8,
}
QWEN = {"depth": 2, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
INTERN = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
INTERN |= {"attention_bias": True, "use_qk_norm": True, "use_mean_pooling": False, "use_mask_token": True}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a projector without bias, two layers seen": (
        "LlavaForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": SIGLIP, "multimodal_projector_bias": False}
        | {"vision_feature_layer": [-2, -1]},
    ),
    "gemma 2's text, tied by the text's own flag": (
        "LlavaOnevisionForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "gemma2", "tie_word_embeddings": True}, "vision_config": SIGLIP},
    ),
    "a pooling head that the config leaves to the class": (
        "LlavaNextForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": SIGLIP},
    ),
    "no pooling head": (
        "LlavaNextForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "phi3"}, "vision_config": SIGLIP | {"vision_use_head": False}},
    ),
    "experts": (
        "LlavaForConditionalGeneration",
        {
            "text_config": TEXT
            | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            "vision_config": CLIP,
        },
    ),
    "a cohere text and a gated projector": (
        "AyaVisionForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "cohere2"}, "vision_config": SIGLIP, "downsample_factor": 2}
        | {"alignment_intermediate_size": 60},
    ),
    "every option of InternVL's encoder": (
        "InternVLForConditionalGeneration",
        {
            "text_config": TEXT | {"model_type": "qwen3"},
            "vision_config": INTERN | {"norm_type": "rms_norm", "image_size": [56, 56], "patch_size": [14, 14]},
            "downsample_ratio": 0.5,
        },
    ),
    "qwen2-vl with its text at the top": (
        "Qwen2VLForConditionalGeneration",
        TEXT
        | {"vision_config": QWEN | {"embed_dim": 64, "hidden_size": 32, "in_channels": 3}, "tie_word_embeddings": True},
    ),
    "qwen2-vl with a text_config that ties": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": TEXT | {"tie_word_embeddings": True},
            "vision_config": QWEN | {"embed_dim": 64, "hidden_size": 32},
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": TEXT,
            "vision_config": QWEN | {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 32},
        },
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": TEXT,
            "vision_config": QWEN
            | {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1]},
        },
    ),
    "glm-4v with biases in its encoder": (
        "Glm4vForConditionalGeneration",
        {
            "text_config": TEXT,
            "vision_config": QWEN
            | {
                "hidden_size": 64,
                "intermediate_size": 96,
                "out_hidden_size": 32,
                "attention_bias": True,
                "image_size": 56,
            },
        },
    ),
    "qwen3-vl with experts": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": TEXT | MIXED,
            "vision_config": QWEN | {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 32},
        },
    ),
    "glm-4v with experts": (
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": TEXT | MIXED | {"n_routed_experts": 4, "first_k_dense_replace": 1},
            "vision_config": QWEN
            | {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 32, "image_size": 56},
        },
    ),
    "kimi's encoder and latent attention": (
        "Kimi_K25ForConditionalGeneration",
        {
            "text_config": TEXT
            | MIXED
            | {"model_type": "deepseek_v3", "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": None}
            | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
            | {"qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1},
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            },
            "projection_hidden_size": 64,
        },
    ),
    "mllama with few pictures' layers": (
        "MllamaForConditionalGeneration",
        {
            "text_config": TEXT | {"num_hidden_layers": 5, "cross_attention_layers": [1, 3]},
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
            }
            | {"attention_heads": 4, "image_size": 56, "vision_output_dim": 192, "max_num_tiles": 2}
            | {"intermediate_layers_indices": [0, 1], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]},
        },
    ),
    "vit with three classes and no biases": (
        "ViTForImageClassification",
        {**INTERN, "qkv_bias": False, "image_size": 56, "patch_size": 14, "id2label": {"0": "a", "1": "b", "2": "c"}},
    ),
    "gemma 3n's text with widths by layer": (
        "Gemma3nForCausalLM",
        TEXT
        | {
            "num_hidden_layers": 5,
            "intermediate_size": [48, 48, 64, 64, 64],
            "num_kv_shared_layers": 2,
            "laurel_rank": 4,
        }
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"], "altup_num_inputs": 3}
        | {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 4, "tie_word_embeddings": True}
        | {"activation_sparsity_pattern": [0.0] * 5},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_config_may_choose_is_counted_as_the_class_counts_it(case):
    name, config = CASES[case]
    config = {"architectures": [name], **config}
    assert parameters(from_config(config)).total == count(build(name, config))


def test_gemma_3n_is_its_text_its_encoders_and_the_weights_that_its_checkpoint_stores_in_vain():
    from transformers.models.gemma3n import configuration_gemma3n as configs
    from transformers.models.gemma3n import modeling_gemma3n as models

    for name in ("gemma-3n-e2b-it", "gemma-3n-e4b-it"):
        config, spec = load_config(name), load(name)
        text = config["text_config"]
        answer = parameters(spec)
        kept = answer.breakdown.root
        assert answer.total - int(kept.child("vision").total) - int(kept.child("audio").total) == count(
            build("Gemma3nForCausalLM", text)
        )
        audio, inner = configs.Gemma3nAudioConfig(**config["audio_config"]), configs.Gemma3nTextConfig(**text)
        parts = [_on_meta(models.Gemma3nAudioEncoder, audio), _on_meta(models.Gemma3nMultimodalEmbedder, audio, inner)]
        assert int(kept.child("audio").total) == sum(map(count, parts))
        vision = configs.Gemma3nVisionConfig(**config["vision_config"])
        embedder = count(_on_meta(models.Gemma3nMultimodalEmbedder, vision, inner))
        assert int(kept.child("vision").total) == embedder + 294_126_912  # timm's encoder: held by the published total
        width, size = text["hidden_size"], text["head_dim"] * text["num_key_value_heads"]
        in_vain = text["num_kv_shared_layers"] * (2 * width * size + text["head_dim"])
        assert answer.total + in_vain == catalogue()[name].hub_total


def _on_meta(module: Any, *configs: Any) -> Any:
    import torch

    with torch.device("meta"):
        return module(*configs)


def test_mistral_small_is_tied_by_the_class_where_its_checkpoint_holds_a_head():
    spec = load("mistral-small-3.1-24b-instruct-2503")
    head = spec.vocab_size * spec.hidden_size
    assert parameters(spec).total + head == catalogue()[spec.name].hub_total


def test_an_encoder_of_pictures_alone_is_counted_and_nothing_else_is_answered():
    spec = from_config({"architectures": ["ViTModel"], **INTERN, "image_size": 56, "patch_size": 14})
    assert parameters(spec).total > 0
    with pytest.raises(InputError, match="reads pictures, not text"):
        train(spec, TrainingPlan())
