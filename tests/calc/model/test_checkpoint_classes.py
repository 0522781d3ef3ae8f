"""Classes that come with their checkpoints: the counts that the Hub's pages state of them (HF API, safetensors.total)."""

from __future__ import annotations

import pytest

from calc.errors import InputError
from calc.model.config import from_config
from calc.parameters import parameters

LING_MINI = {
    "vocab_size": 157184,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "use_qk_norm": True,
    "num_experts": 256,
    "num_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "use_bias": False,
    "use_qkv_bias": False,
    "tie_word_embeddings": False,
}
DEEPSEEK_MOE = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
}
MINIMAX_M1 = {
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    "shared_intermediate_size": 0,
    "postnorm": True,
}
NOMIC_V2 = {
    "activation_function": "gelu",
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "vocab_size": 250048,
    "type_vocab_size": 1,
    "num_experts": 8,
    "moe_top_k": 2,
    "moe_every_n_layers": 2,
    "qkv_proj_bias": True,
    "mlp_fc1_bias": True,
    "n_positions": 2048,
}
JINA_V3 = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 250002,
    "type_vocab_size": 1,
    "position_embedding_type": "rotary",
    "lora_adaptations": ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"],
    "lora_rank": 4,
    "max_position_embeddings": 8194,
}


@pytest.mark.parametrize(
    ("architecture", "config", "total", "why"),
    [
        # the checkpoint also holds the router's correction of each expert, which no layer learns by gradient
        ("BailingMoeV2ForCausalLM", LING_MINI, 16_255_643_392 - 19 * 256, "inclusionAI/Ling-mini-2.0"),
        ("DeepseekForCausalLM", DEEPSEEK_MOE, 16_375_728_128, "deepseek-ai/deepseek-moe-16b-base"),
        ("MiniMaxM1ForCausalLM", MINIMAX_M1, 456_089_655_296, "MiniMaxAI/MiniMax-M1-80k"),
        ("NomicBertModel", NOMIC_V2, 475_292_928, "nomic-ai/nomic-embed-text-v2-moe"),
        ("XLMRobertaModel", JINA_V3, 572_310_396, "jinaai/jina-embeddings-v3, whose class bears its parent's name"),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_a_class_of_a_checkpoint_has_the_total_of_its_page(architecture, config, total, why):
    assert parameters(from_config({"architectures": [architecture], **config})).total == total


@pytest.mark.parametrize(
    ("change", "field"),
    [({"attn_type_list": [2] * 80}, "attn_type_list"), ({"shared_intermediate_size": 8}, "shared_intermediate_size")],
)
def test_what_is_not_understood_of_minimax_is_refused(change, field):
    with pytest.raises(InputError, match=field):
        from_config({"architectures": ["MiniMaxM1ForCausalLM"], **MINIMAX_M1, **change})


def test_arctic_has_a_dense_mlp_next_to_its_experts():
    """Snowflake's announcement: 480B parameters, 17B active."""
    config = {
        "vocab_size": 32000,
        "hidden_size": 7168,
        "intermediate_size": 4864,
        "num_hidden_layers": 35,
        "num_attention_heads": 56,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 2,
    }
    answer = parameters(from_config({"architectures": ["ArcticForCausalLM"], **config}))
    layer = 128 * (3 * 7168 * 4864 + 7168) + 3 * 7168**2 + 2 * 7168 * (7168 + 1024) + 3 * 7168
    assert answer.total == 35 * layer + 2 * 32000 * 7168 + 7168
    assert round(answer.active / 1e9) == 17


def test_step_has_more_heads_in_the_layers_with_a_window():
    """stepfun-ai/Step-3.5-Flash: 196B parameters, 11B active; 96 heads where a window of 512 is seen, 64 where all is."""
    config = {
        "vocab_size": 128896,
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "moe_num_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"],
        "sliding_window": 512,
    }
    even = parameters(from_config({"architectures": ["Step3p5ForCausalLM"], **config})).total
    own = config | {"attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96}}
    more = parameters(from_config({"architectures": ["Step3p5ForCausalLM"], **own})).total
    assert more - even == 33 * 32 * (2 * 128 * 4096 + 4096)
    assert more // 10**9 == 196


def test_a_draft_models_head_is_refused_and_another_class_is_counted_by_its_model_type_with_a_note():
    llama = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 9,
    }
    with pytest.raises(InputError, match="Eagle"):
        from_config({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **llama})
    spec = from_config({"architectures": ["LlamaForValueEstimation"], "model_type": "llama", **llama})
    assert spec.architecture == "LlamaForCausalLM"
    assert any("LlamaForValueEstimation" in note for note in spec.notes)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "change"),
    [
        # microsoft/deberta-v3-base's and deberta-base's own shapes, at a small size
        (
            "DebertaV2ForSequenceClassification",
            {
                "relative_attention": True,
                "position_buckets": 16,
                "norm_rel_ebd": "layer_norm",
                "share_att_key": True,
                "pos_att_type": "p2c|c2p",
                "position_biased_input": False,
            },
        ),
        ("DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c"], "conv_kernel_size": 3}),
        ("DebertaV2Model", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "embedding_size": 32}),
        ("DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": "c2p|p2c", "position_biased_input": False}),
        ("AlbertModel", {"num_hidden_groups": 2, "embedding_size": 16}),
        ("LongformerForMaskedLM", {"attention_window": [8, 8, 8, 8]}),
    ],
)
def test_options_of_encoders_are_those_of_transformers(name, change):
    import transformers

    from tests.calc.model.meta_model import build, count

    small = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 99,
        "max_position_embeddings": 40,
        "pooler_hidden_size": 64,
    }
    config = getattr(transformers, name).config_class().to_dict() | small | change | {"architectures": [name]}
    assert parameters(from_config(config)).total == count(build(name, config))
