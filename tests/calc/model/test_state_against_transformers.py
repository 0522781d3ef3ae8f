"""What a sequence keeps, layer by layer, equals the cache that transformers fills when a tiny model of the family is run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from calc.model.config import from_config
from calc.serving.cache import Kept, kept_tensors

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

TOKENS = 12
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": None,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}
WIDE = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "global_head_dim": 16, "sliding_window": 32}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 1}
KIMI = {"q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["dense"] + ["sparse"] * 3}
LONGCAT: dict[str, Any] = {
    "num_layers": 2,
    "num_hidden_layers": None,
    "zero_expert_num": 2,
    "head_dim": 4,
    "intermediate_size": None,
}
LONGCAT |= {"ffn_hidden_size": 48, "moe_topk": 2, "expert_ffn_hidden_size": 16, "moe_intermediate_size": None}
DBRX: dict[str, Any] = dict.fromkeys(key for key in SIZES if key != "vocab_size" and not key.endswith("_token_id"))
DBRX |= {"d_model": 32, "n_heads": 4, "n_layers": 4, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}}
DBRX |= {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}}
XLSTM: dict[str, Any] = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"))
XLSTM |= {"max_position_embeddings": None, "num_heads": 2, "hidden_size": 128}
ZAMBA = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "mamba_d_state": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "MixtralForCausalLM": EXPERTS,
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": EXPERTS,
    "Gemma2ForCausalLM": {"sliding_window": 32},
    "Gemma3ForCausalLM": {"sliding_window": 32},
    "Gemma4ForCausalLM": WIDE,
    "GptOssForCausalLM": EXPERTS,
    "Glm4MoeForCausalLM": EXPERTS | {"first_k_dense_replace": 1},
    "Llama4ForCausalLM": EXPERTS | {"no_rope_layers": [1, 1, 1, 0], "intermediate_size_mlp": 48},
    "MiniMaxM2ForCausalLM": EXPERTS,
    "GPT2LMHeadModel": GPT,
    "GPTBigCodeForCausalLM": GPT,
    "GPTJForCausalLM": GPT | {"rotary_dim": 4},
    "GPTNeoXForCausalLM": {},
    "BloomForCausalLM": {"n_head": 4, "n_layer": 4},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "PhiForCausalLM": {},
    "Phi3ForCausalLM": {},
    "CohereForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "StableLmForCausalLM": {},
    "GraniteForCausalLM": {},
    "SmolLM3ForCausalLM": {},
    "DeepseekV2ForCausalLM": EXPERTS | LATENT,
    "DeepseekV3ForCausalLM": EXPERTS | LATENT,
    "Qwen3NextForCausalLM": EXPERTS | DELTA,
    "Qwen3_5ForCausalLM": DELTA,
    "Qwen3_5MoeForCausalLM": EXPERTS | DELTA,
    "MambaForCausalLM": {"state_size": 4},
    "Mamba2ForCausalLM": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "JambaForCausalLM": EXPERTS | {"num_hidden_layers": 8, "mamba_d_state": 4, "use_mamba_kernels": False},
    "BambaForCausalLM": MAMBA2 | {"attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": EXPERTS | MAMBA2 | {"layer_types": ["mamba", "attention"] * 2},
    "NemotronHForCausalLM": NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "HunYuanDenseV1ForCausalLM": {},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 4, "moe_topk": 2},
    "BitNetForCausalLM": {},
    "DiffLlamaForCausalLM": {},
    "NemotronForCausalLM": {},
    "MinistralForCausalLM": {"sliding_window": 32},
    "FalconH1ForCausalLM": MAMBA2 | {"mamba_d_ssm": 64},
    "Dots1ForCausalLM": EXPERTS | {"sliding_window": None},
    "Lfm2MoeForCausalLM": EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "DbrxForCausalLM": DBRX,
    "DogeForCausalLM": {},
    "ModernBertDecoderForCausalLM": {"num_key_value_heads": None, "head_dim": None, "local_attention": 32},
    "OlmoHybridForCausalLM": DELTA,
    "BailingHybridForCausalLM": EXPERTS | LATENT | {"q_lora_rank": None, "head_dim": 8, "layer_group_size": 2},
    "Lfm3ForCausalLM": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "sliding_window": 32},
    "LongcatFlashForCausalLM": EXPERTS | LATENT | LONGCAT,
    "xLSTMForCausalLM": XLSTM,
    "ZayaForCausalLM": EXPERTS | {"router_hidden_size": 8, "num_experts_per_tok": 1},
    "JetMoeForCausalLM": EXPERTS | {"kv_channels": 8, "num_attention_heads": None, "head_dim": None},
    "AXK2ForCausalLM": EXPERTS | LATENT | {"head_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 16},
    "ZambaForCausalLM": ZAMBA | {"n_mamba_heads": 2},
    "Zamba2ForCausalLM": ZAMBA | {"n_mamba_heads": 8},
    "KimiLinearForCausalLM": EXPERTS | LATENT | KIMI | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}


def _held(layer: Any) -> int:
    """The elements that a layer of the cache holds, whatever its kind."""
    import torch

    total = 0
    for value in vars(layer).values():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        total += sum(each.numel() for each in inner if isinstance(each, torch.Tensor) and each.dim() > 1)
    return total


def _counted(kept: Kept) -> int:
    return kept.elements * (1 if kept.fixed else min(TOKENS, kept.most or TOKENS))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_keeps_what_transformers_keeps(name):
    import torch
    import transformers

    model_class = getattr(transformers, name)
    fields = {key: value for key, value in (SIZES | FAMILIES[name]).items() if value is not None}
    config = model_class.config_class(**fields)
    with torch.no_grad():
        answer = model_class(config).eval()(torch.arange(3, 3 + TOKENS)[None], use_cache=True)
    cache = getattr(answer, "cache_params", None) or getattr(answer, "past_key_values", None) or answer.cache
    spec = from_config(config.to_dict() | {"architectures": [name]})
    kinds = kept_tensors(spec, 1, 0, 0, False)
    layers = getattr(cache, "layers", None) or [SimpleNamespace(states=kept) for kept in cache.rnn_state.values()]
    assert [sum(map(_counted, kinds[at])) for at in spec.layers.pattern] == [_held(layer) for layer in layers]
