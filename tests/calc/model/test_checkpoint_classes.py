"""Classes that come with their checkpoints: the counts that the Hub's pages state of them (HF API, safetensors.total), and those of
mlx-lm's classes of the same models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calc.errors import InputError
from calc.model.config import from_config
from calc.parameters import parameters
from tests.calc.model.checkpoint_configs import (
    DEEPSEEK_MOE,
    DREAM,
    GROK_2,
    JINA_V3,
    LING_1T,
    LING_FLASH,
    LING_MINI,
    LLADA,
    MINIMAX_M1,
    NOMIC_V2,
    OPENELM,
    RWKV_7,
)


@pytest.mark.parametrize(
    ("architecture", "config", "total", "why"),
    [
        # the checkpoint also holds the router's correction of each expert, which no layer learns by gradient
        ("BailingMoeV2ForCausalLM", LING_MINI, 16_255_643_392 - 19 * 256, "inclusionAI/Ling-mini-2.0"),
        ("DeepseekForCausalLM", DEEPSEEK_MOE, 16_375_728_128, "deepseek-ai/deepseek-moe-16b-base"),
        ("MiniMaxM1ForCausalLM", MINIMAX_M1, 456_089_655_296, "MiniMaxAI/MiniMax-M1-80k"),
        ("NomicBertModel", NOMIC_V2, 475_292_928, "nomic-ai/nomic-embed-text-v2-moe"),
        ("BailingMoeV2ForCausalLM", LING_FLASH, 102_889_705_216 - 31 * 256, "inclusionAI/Ling-flash-2.0"),
        ("BailingMoeV2ForCausalLM", LING_1T, 999_705_328_640 - 76 * 256, "inclusionAI/Ling-1T"),
        ("Grok1ForCausalLM", GROK_2, 269_515_497_472, "xai-org/grok-2"),
        ("LLaDAModelLM", LLADA, 8_015_581_184, "GSAI-ML/LLaDA-8B-Base"),
        ("DreamModel", DREAM, 7_615_616_512, "Dream-org/Dream-v0-Base-7B, whose tensors are Qwen 2.5 7B's"),
        ("RWKV7ForCausalLM", RWKV_7, 1_527_404_544, "RWKV7 World 1.5B as flash-linear-attention stores it"),
        ("OpenELMForCausalLM", OPENELM, 1_079_891_456, "apple/OpenELM-1_1B"),
        ("XLMRobertaModel", JINA_V3, 572_310_396, "jinaai/jina-embeddings-v3, whose class bears its parent's name"),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_a_class_of_a_checkpoint_has_the_total_of_its_page(architecture, config, total, why):
    assert parameters(from_config({"architectures": [architecture], **config})).total == total


_MLX = json.loads((Path(__file__).parents[2] / "published" / "mlx_class_counts.json").read_text(encoding="utf-8"))[
    "rows"
]


@pytest.mark.parametrize("row", _MLX, ids=[f"{row['class']}-{at}" for at, row in enumerate(_MLX)])
def test_a_class_counts_what_mlx_lm_builds_of_the_same_config(row):
    """mlx-lm also counts the corrections of routers, which no layer learns by gradient."""
    spec = from_config({"architectures": [row["class"]], **row["config"]})
    assert parameters(spec).total + row.get("buffer_elements", 0) == row["parameters"]


def test_grok_1_has_no_dense_mlp_next_to_its_experts():
    """xai-org/grok-1: 8 experts of 32,768, 64 layers, 48 heads, vocabulary 131,072; hpcai-tech's checkpoint has a head of its own."""
    config = {key: value for key, value in GROK_2.items() if key not in ("residual_moe", "moe_intermediate_size")}
    config |= {"hidden_size": 6144, "num_attention_heads": 48}
    layer = 8 * 3 * 6144 * 32768 + 2 * 6144 * (6144 + 1024) + 8 * 6144 + 4 * 6144
    spec = from_config({"architectures": ["Grok1ModelForCausalLM"], **config})
    assert parameters(spec).total == 64 * layer + 2 * 131072 * 6144 + 6144


@pytest.mark.parametrize("name", ["LLaDAModelLM", "DreamModel"])
def test_a_model_that_writes_by_diffusion_says_so_and_has_no_growing_cache(name):
    spec = from_config({"architectures": [name], **(LLADA if name.startswith("LLaDA") else DREAM)})
    assert not spec.generates
    assert any("diffusion" in note for note in spec.notes)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("JAISLMHeadModel", "no published total"),
        ("CogVLMForCausalLM", "second set of weights"),
        ("Rwkv6ForCausalLM", "versions 4 and 7"),
        ("OuroForCausalLM", "several times"),
        ("MedusaModel", "draft model"),
    ],
)
def test_a_known_class_that_is_not_covered_is_refused_with_its_reason(name, why):
    with pytest.raises(InputError, match=f"{name}.*{why}"):
        from_config({"architectures": [name], "model_type": "llama", **DREAM})


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


def test_step_is_its_checkpoint_but_for_routers_corrections_and_three_layers_of_prediction():
    """stepfun-ai/Step-3.5-Flash: safetensors.total 199,384,301,376. 96 heads where a window of 512 is seen, 64 where all is; each layer of
    prediction is a dense one with a window, a projection of 2 h to h, three norms and a head of its own."""
    config = {
        "vocab_size": 128896,
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_attention_groups": 8,
        "head_dim": 128,
        "moe_num_experts": 288,
        "moe_top_k": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,
        "sliding_window": 512,
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96},
        "moe_layers_enum": ",".join(str(at) for at in range(3, 45)),
        "num_nextn_predict_layers": 3,
    }
    mixer = 2 * 96 * 128 * 4096 + 2 * 8 * 128 * 4096 + 96 * 4096 + 2 * 128
    prediction = mixer + 3 * 4096 * 11264 + 2 * 4096 * 4096 + 5 * 4096 + 128896 * 4096
    total = parameters(from_config({"architectures": ["Step3p5ForCausalLM"], **config})).total
    assert total + 42 * 288 + 3 * prediction == 199_384_301_376


@pytest.mark.parametrize("value", ["3,4,x", {"a": 1}, "9" * 9, [-1]])
def test_layers_with_experts_are_numbers(value):
    with pytest.raises(InputError, match="moe_layers_enum"):
        from_config(
            {
                "architectures": ["Step3p5ForCausalLM"],
                **DREAM,
                "moe_num_experts": 8,
                "moe_top_k": 2,
                "moe_intermediate_size": 8,
                "share_expert_dim": 8,
                "moe_layers_enum": value,
            }
        )


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
