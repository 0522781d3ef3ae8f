"""Sizes that are not the defaults: the count of the real class, with every option that adds or shares weights."""

from __future__ import annotations

from typing import Any

import pytest

from calc.errors import InputError
from calc.model.config import from_config
from calc.parameters import parameters
from calc.serving import ServingPlan, serve
from calc.training import TrainingPlan, train
from tests.calc.model.meta_model import build, count

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning")]

GROUPED = {"head_dim": 128, "num_key_value_heads": 8}
ZAMBA2_7B = {
    "hidden_size": 3584,
    "n_mamba_heads": 112,
    "mamba_ngroups": 2,
    "num_mem_blocks": 2,
    "use_mem_rope": True,
    "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
    "num_hidden_layers": 5,
}
LFM2 = ["full_attention" if at in (2, 6, 10, 14, 18, 21) else "conv" for at in range(24)]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bitnet-b1.58-2b": ("BitNetForCausalLM", {"tie_word_embeddings": True}),
    "bitnet with biases": ("BitNetForCausalLM", {"attention_bias": True}),
    "diffllama": ("DiffLlamaForCausalLM", {"num_key_value_heads": 8, "attention_bias": True}),
    "nemotron": ("NemotronForCausalLM", {"num_key_value_heads": 8, "mlp_bias": True, "attention_bias": True}),
    "ministral-8b": ("MinistralForCausalLM", GROUPED | {"hidden_size": 4096, "num_hidden_layers": 36}),
    "hunyuan-7b": ("HunYuanDenseV1ForCausalLM", GROUPED | {"vocab_size": 128_167, "tie_word_embeddings": True}),
    "hunyuan-a13b": (
        "HunYuanMoEV1ForCausalLM",
        GROUPED | {"num_experts": 64, "moe_topk": 8, "intermediate_size": 3072, "vocab_size": 128_167},
    ),
    "zamba, few layers": (
        "ZambaForCausalLM",
        {"hidden_size": 1024, "num_hidden_layers": 12, "attn_layer_period": 3, "attn_layer_offset": 2},
    ),
    "zamba with biases": ("ZambaForCausalLM", {"hidden_size": 1024, "mamba_conv_bias": False, "mamba_proj_bias": True}),
    "zamba2-7b, few layers": ("Zamba2ForCausalLM", ZAMBA2_7B),
    "zamba2 with every adapter": (
        "Zamba2ForCausalLM",
        {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "add_bias_linear": True, "adapter_rank": 64},
    ),
    "zamba2, more blocks than uses": (
        "Zamba2ForCausalLM",
        {"num_mem_blocks": 3, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    ),
    "dbrx": (
        "DbrxForCausalLM",
        {"d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32_768, "vocab_size": 100_352}
        | {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500_000}}
        | {"ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4}},
    ),
    "doge with biases": (
        "DogeForCausalLM",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "ettin-decoder-1b": (
        "ModernBertDecoderForCausalLM",
        {"hidden_size": 1792, "intermediate_size": 3840, "num_hidden_layers": 28, "num_attention_heads": 28},
    ),
    "modernbert decoder with biases": (
        "ModernBertDecoderForCausalLM",
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "decoder_bias": False, "classifier_bias": True},
    ),
    "olmo hybrid, other heads": (
        "OlmoHybridForCausalLM",
        {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 3}
        | {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "attention_bias": True},
    ),
    "ring with low-rank queries": (
        "BailingHybridForCausalLM",
        {"q_lora_rank": 512, "num_hidden_layers": 12, "layer_group_size": 4, "first_k_dense_replace": 1},
    ),
    "lfm3, plain": (
        "Lfm3ForCausalLM",
        {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True, "attention_bias": True},
    ),
    "xmod, three languages": (
        "XmodForCausalLM",
        {"languages": ["a", "b", "c"], "adapter_layer_norm": True, "pre_norm": True},
    ),
    "xlm, fifteen languages": ("XLMWithLMHeadModel", {"n_langs": 15, "emb_dim": 1024, "n_heads": 8, "causal": True}),
    "rocbert without shapes": ("RoCBertForCausalLM", {"enable_shape": False, "hidden_size": 1536}),
    "rocbert, not joined": ("RoCBertForCausalLM", {"concat_input": False}),
    "rembert, square": ("RemBertForCausalLM", {"input_embedding_size": 1152}),
    "xlnet-base": ("XLNetLMHeadModel", {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}),
    "dots.llm1": (
        "Dots1ForCausalLM",
        {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    ),
    "dots.llm1 with windows": (
        "Dots1ForCausalLM",
        {"n_routed_experts": 16, "num_experts_per_tok": 6, "n_shared_experts": 1, "max_window_layers": 30},
    ),
    "lfm2-8b-a1b": ("Lfm2MoeForCausalLM", {"num_hidden_layers": 24, "layer_types": LFM2}),
    "lfm2-moe with biases": (
        "Lfm2MoeForCausalLM",
        {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_bias": True},
    ),
    "longcat without zero experts": (
        "LongcatFlashForCausalLM",
        {"zero_expert_num": 0, "attention_bias": True, "num_layers": 2},
    ),
    "xlstm, fused, with biases": (
        "xLSTMForCausalLM",
        {"use_bias": True, "weight_mode": "fused", "hidden_size": 1024, "num_heads": 4, "qk_dim_factor": 1.0},
    ),
    "falcon-h1-1.5b": (
        "FalconH1ForCausalLM",
        {"hidden_size": 2048, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "num_attention_heads": 8}
        | {"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "zaya1-8b, few layers, with biases": (
        "ZayaForCausalLM",
        {"attention_bias": True, "lm_head_bias": True, "num_hidden_layers": 4, "cca_time0": 3, "sliding_window": 128}
        | {"layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"]},
    ),
    "jetmoe-8b": ("JetMoeForCausalLM", {"num_hidden_layers": 24}),
    "ax-k2, other ranks": (
        "AXK2ForCausalLM",
        {
            "q_lora_rank": 512,
            "gated_norm_rank": 8,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "n_shared_experts": 2,
        },
    ),
    "falcon-h1 with biases": (
        "FalconH1ForCausalLM",
        {"mamba_d_ssm": None, "hidden_size": 1024, "mamba_n_heads": 32, "mamba_rms_norm": True, "mamba_n_groups": 2}
        | {"projectors_bias": True, "attention_bias": True, "mlp_bias": True, "mamba_conv_bias": False},
    ),
}


def _config(class_name: str, fields: dict[str, Any]) -> dict[str, Any]:
    import transformers

    return getattr(transformers, class_name).config_class(**fields).to_dict() | {"architectures": [class_name]}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_count_is_the_classs(name):
    class_name, fields = VARIANTS[name]
    config = _config(class_name, fields)
    spec = from_config(config)
    assert parameters(spec).total == count(build(class_name, config))
    assert spec.unread == ()


def test_longcat_flash_is_as_large_and_at_most_as_active_as_its_paper_says():
    answer = parameters(from_config(_config("LongcatFlashForCausalLM", {})))
    assert answer.total == 560_664_958_976  # "560B", arXiv 2509.01322
    assert answer.active_without_embedding == 31_377_348_608  # "18.6B to 31.3B", by the zero experts chosen
    assert any("zero experts" in text for text in answer.spec.assumptions)


def test_dbrx_is_as_large_and_as_active_as_its_makers_say():
    answer = parameters(from_config(_config(*VARIANTS["dbrx"])))
    assert (answer.total, answer.active) == (131_596_523_520, 36_469_708_800)  # "132B total, 36B active"


def test_a_shared_block_is_held_once_computed_and_read_at_each_use():
    spec = from_config(_config("Zamba2ForCausalLM", ZAMBA2_7B))
    once = from_config(_config("Zamba2ForCausalLM", ZAMBA2_7B | {"num_mem_blocks": 1}))
    more = parameters(spec).total - parameters(once).total
    (block,) = (kind for kind in spec.layers.kinds if kind.kind == "hybrid")
    total = sum(part.parameters for part in block.parts if part.name in ("attention", "mlp", "norms"))
    assert more == total
    # both run three blocks and keep three caches
    assert serve(spec, ServingPlan()).as_json()["kv_bytes"] == serve(once, ServingPlan()).as_json()["kv_bytes"]
    reads = [serve(each, ServingPlan()).as_json()["weights_read_bytes"] for each in (spec, once)]
    assert reads[0] == reads[1]


def test_layers_that_share_weights_are_not_parted():
    spec = from_config(_config("Zamba2ForCausalLM", ZAMBA2_7B))
    with pytest.raises(InputError, match="pp"):
        serve(spec, ServingPlan(pp=2))


@pytest.mark.parametrize(
    ("name", "fields"), [("Zamba2ForCausalLM", ZAMBA2_7B), ("FalconH1ForCausalLM", {}), ("JetMoeForCausalLM", {})]
)
def test_the_training_of_two_mixers_in_a_layer_is_refused(name, fields):
    with pytest.raises(InputError, match="share weights, hold two mixers"):
        train(from_config(_config(name, fields)), TrainingPlan(seq=128), None)


def test_what_the_training_ledger_leaves_out_is_told():
    spec = from_config(_config("BitNetForCausalLM", {}))
    assert any("estimate: a norm stands before" in text for text in train(spec, TrainingPlan(seq=128)).assumptions)
