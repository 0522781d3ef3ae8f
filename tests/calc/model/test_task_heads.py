"""Classes with another head than their causal sibling: each counted exactly, or refused by name, never wrong."""

from __future__ import annotations

import pytest

from calc.errors import InputError
from calc.model.config import from_config
from calc.parameters import parameters

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
BERT = LLAMA | {"max_position_embeddings": 32, "type_vocab_size": 2}


def total(architecture, **fields):
    return parameters(from_config({"architectures": [architecture], **fields})).total


def test_a_trunk_without_its_head_is_the_model_without_that_tensor():
    assert total("LlamaForCausalLM", **LLAMA) - total("LlamaModel", **LLAMA) == 100 * 64


@pytest.mark.parametrize(
    ("head", "more"),
    [
        ("ForSequenceClassification", 3 * 64),
        ("ForTokenClassification", 3 * 64 + 3),
        ("ForQuestionAnswering", 2 * 64 + 2),
        ("ForRewardModel", 64 * 64 + 64 + 64 + 1),
    ],
)
def test_a_decoder_with_another_head_has_that_head(head, more):
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    assert total(f"Llama{head}", **LLAMA, **labels) - total("LlamaModel", **LLAMA) == more


def test_bert_classifies_on_its_pooler_and_roberta_on_a_dense_layer():
    pooler, classifier = 64 * 64 + 64, 2 * 64 + 2
    assert total("BertForSequenceClassification", **BERT) - total("BertModel", **BERT) == classifier
    assert total("RobertaForSequenceClassification", **BERT) - total("RobertaModel", **BERT) == classifier
    assert total("BertModel", **BERT) - total("BertForTokenClassification", **BERT) == pooler - classifier


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("MPTForCausalLM", "MptForCausalLM"),
        ("PhiMoEForCausalLM", "PhimoeForCausalLM"),
        ("RWForCausalLM", "FalconForCausalLM"),
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    ],
)
def test_a_class_is_found_in_the_spelling_of_another_year(written, known):
    from calc.model.families.class_names import reading

    found = reading({"architectures": [written]})
    assert (found.known, found.architecture) == (known, known)
    assert written in found.assumptions[0]


@pytest.mark.parametrize("section", ["text_config", "llm_config", "language_config"])
def test_an_unknown_wrapper_is_its_text_model_with_a_note(section):
    inner = LLAMA | {"model_type": "llama"}
    spec = from_config({"architectures": ["UnheardOfVLModel"], section: inner, "vision_config": {"hidden_size": 8}})
    assert parameters(spec).total == total("LlamaForCausalLM", **LLAMA)
    assert any("UnheardOfVLModel" in note and "vision_config" in note for note in spec.notes)


@pytest.mark.parametrize(
    "name", ["BartForTokenClassification", "BertForNextSentence", "XLNetForQuestionAnswering", "NoSuchModel"]
)
def test_a_class_whose_trunk_is_another_is_refused_by_name(name):
    with pytest.raises(InputError, match=name):
        from_config({"architectures": [name], **LLAMA})


def test_deepseek_ocrs_text_model_has_plain_attention():
    """deepseek-ai/DeepSeek-OCR, config.json: `language_config` names DeepseekV2ForCausalLM with use_mla false."""
    language = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 1280,
        "intermediate_size": 6848,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "moe_intermediate_size": 896,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 129280,
        "use_mla": False,
        "kv_lora_rank": None,
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
    }
    spec = from_config({"architectures": ["DeepseekOCRForCausalLM"], "language_config": language, "vision_config": {}})
    attention, expert, norms = 4 * 1280**2, 3 * 1280 * 896, 2 * 1280
    layers = 12 * (attention + norms) + 3 * 1280 * 6848 + 11 * (66 * expert + 64 * 1280)
    assert parameters(spec).total == layers + 2 * 129280 * 1280 + 1280
    assert "not" in spec.notes[0]


def test_molmos_text_model_is_counted_and_says_so():
    """allenai/Molmo-7B-D, config.json: Qwen2-7B's layers, a vocabulary of 152,064 and 128 words of its own."""
    config = {
        "architectures": ["MolmoForCausalLM"],
        "embedding_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 37888,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "qkv_bias": True,
        "vocab_size": 152064,
    }
    spec = from_config({**config, "tie_word_embeddings": False})
    assert parameters(spec).total == 7_615_616_512 + 128 * 3584
    assert "vision" in spec.notes[0]


def test_debertas_embedding_is_normed_over_the_hidden_size_where_it_is_narrower():
    """DebertaV2Model of transformers 5.24 on the meta device has 357,888 parameters with these sizes."""
    config = {
        "vocab_size": 1000,
        "hidden_size": 128,
        "embedding_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config |= {
        "intermediate_size": 256,
        "max_position_embeddings": 64,
        "type_vocab_size": 0,
        "relative_attention": True,
    }
    config |= {"architectures": ["DebertaV2Model"], "model_type": "deberta-v2"}
    assert parameters(from_config(config)).total == 357_888
