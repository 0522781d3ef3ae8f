"""Models of pictures and sound whose text model alone is counted: the totals that the text models' own pages state."""

from __future__ import annotations

import pytest

from calc.errors import InputError
from calc.model.config import from_config
from calc.parameters import parameters

PICTURES = {"hidden_size": 1024, "num_hidden_layers": 24}
MINICPM = {
    "hidden_size": 2304,
    "intermediate_size": 5760,
    "num_hidden_layers": 40,
    "num_attention_heads": 36,
    "num_key_value_heads": 36,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
YI = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 64000,
}
INTERNLM_2 = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 92544,
    "bias": False,
}
PHI_3 = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
}
MISTRAL = {"model_type": "mistral", "vocab_size": 32003, "max_position_embeddings": 32768}
SHORT_LLAMA = {"model_type": "llama", "num_hidden_layers": 30, "vocab_size": 102400, "max_position_embeddings": 16384}


@pytest.mark.parametrize(
    ("config", "total", "read"),
    [
        # deepseek-ai/deepseek-vl-7b-base leaves every width to Llama's class: deepseek-ai/deepseek-llm-7b-base, 6,910,365,696
        (
            {"architectures": ["MultiModalityCausalLM"], "language_config": SHORT_LLAMA},
            6_910_365_696,
            "LlamaForCausalLM",
        ),
        # HuggingFaceM4/idefics2-8b: Mistral 7B (7,241,732,096) with three words more in both tables
        (
            {"architectures": ["Idefics2ForConditionalGeneration"], "text_config": MISTRAL, "vision_config": PICTURES},
            7_241_732_096 + 2 * 3 * 4096,
            "MistralForCausalLM",
        ),
        # 01-ai/Yi-VL-6B: 01-ai/Yi-6B, 6,061,035,520
        ({"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava", **YI}, 6_061_035_520, "LlamaForCausalLM"),
        # microsoft/Phi-3-vision: microsoft/Phi-3-mini-4k-instruct, 3,821,079,552
        ({"architectures": ["Phi3VForCausalLM"], "embd_layer": {}, **PHI_3}, 3_821_079_552, "Phi3ForCausalLM"),
        # internlm/internlm-xcomposer2-7b: internlm/internlm2-7b, 7,737,708,544
        (
            {"architectures": ["InternLMXComposer2ForCausalLM"], "img_size": 490, **INTERNLM_2},
            7_737_708_544,
            "InternLM2ForCausalLM",
        ),
        # openbmb/MiniCPM-V-2 states no version: openbmb/MiniCPM-2B-sft-bf16, 2,724,880,896 (and in MTEB)
        ({"architectures": ["MiniCPMV"], "vocab_size": 122753, **MINICPM}, 2_724_880_896, "MiniCPMForCausalLM"),
    ],
)
def test_the_text_model_alone_has_the_total_of_its_own_page(config, total, read):
    spec = from_config(config)
    assert spec.architecture == read
    assert parameters(spec).total == total
    assert any("alone" in note for note in spec.notes)


def test_a_wrapper_of_transformers_ties_the_head_by_its_own_field():
    """DeepSeek-VL's class ties its head though its text_config says false: the whole would else be smaller than its text model."""
    inside = {**SHORT_LLAMA, "tie_word_embeddings": False}
    config = {"architectures": ["NoSuchVLForConditionalGeneration"], "text_config": inside, "vision_config": PICTURES}
    apart, tied = (parameters(from_config({**config, "tie_word_embeddings": value})).total for value in (False, True))
    assert apart - tied == 102400 * 4096


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"architectures": ["MiniCPMV"], **YI}, "version"),
        ({"architectures": ["MiniCPMV"], "version": [1], **YI}, "version"),
        (
            {"architectures": ["NoSuchModel"], "language_config": {**SHORT_LLAMA, "hidden_size": "x"}},
            "language_config.hidden_size",
        ),
        (
            {"architectures": ["NoSuchVL"], "text_config": {"model_type": "qwen2_vl_text", "vocab_size": 9}},
            "missing",
        ),
    ],
)
def test_what_a_wrapper_leaves_open_is_refused_by_its_name(config, field):
    with pytest.raises(InputError, match=field):
        from_config(config)
