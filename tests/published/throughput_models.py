"""Models and GPUs of published training runs by the names that their sources use."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from calc.catalogue import catalogue, load_config
from calc.hardware import Gpu, gpu, gpus
from calc.model.config import from_config
from calc.model.spec import ModelSpec

# d_model, heads and layers of llm-foundry's sizes (its scripts/train/yamls)
MPT = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip
NAMES = {
    "Llama-3-8B": "meta-llama-3-8b", "Llama-3.1-8B": "meta-llama-3.1-8b", "Llama-3.1-70B": "meta-llama-3.1-70b",
    "Llama-3-405B": "meta-llama-3.1-405b", "Llama-3.1-405B": "meta-llama-3.1-405b", "LLAMA3.1_405B": "meta-llama-3.1-405b",
    "LLAMA3_8B": "meta-llama-3-8b", "LLAMA3_70B": "meta-llama-3-70b", "Llama-3-70B": "meta-llama-3-70b",
    "Llama-2-7B": "llama-2-7b", "Llama-2-13B": "llama-2-13b", "Llama-2-70B": "llama-2-70b", "Qwen3-32B": "qwen3-32b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b", "Qwen3_235B_a22B": "qwen3-235b-a22b", "DeepSeekV3": "deepseek-v3",
    "DeepSeek-V3": "deepseek-v3", "GPT OSS 120B": "gpt-oss-120b", "Kimi_K2": "kimi-k2-instruct",
    "DeepSeekV4 Flash": "deepseek-v4-flash-fp8", "Nemotron_3_Ultra": "nvidia-nemotron-3-ultra-550b-a55b-bf16",
    "SmolLM-1.7B": "smollm2-1.7b", "Qwen3-30B-A3B": "qwen3-30b-a3b", "Qwen3_Next_80B_a3B": "qwen3-next-80b-a3b-thinking",
}  # fmt: skip
# what the catalogue lacks, as its own repository's config has it
OTHERS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 5120, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 60,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_group": 8, "topk_group": 3, "vocab_size": 102400, "max_position_embeddings": 163840, "tie_word_embeddings": False,
    },
    "Nemotron_3_Nano": {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "num_hidden_layers": 52, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128,
        "expand": 2, "mlp_hidden_act": "relu2", "vocab_size": 131072, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
    "Nemotron_3_Super": {  # 40 recurrences, 40 experts, 8 attentions; their order changes no second
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 2688,
        "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024,
        "n_routed_experts": 512, "n_shared_experts": 1, "num_experts_per_tok": 22, "n_group": 1, "topk_group": 1,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 88,
        "hybrid_override_pattern": 8 * "MEMEMEMEME*", "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128, "expand": 2, "mlp_hidden_act": "relu2", "vocab_size": 131072,
        "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
    "Moonlight-16B-A3B": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11264,
        "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_group": 1, "topk_group": 1, "vocab_size": 163840, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
    "DeepSeek-V3-16B (torchtitan)": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_group": 1, "topk_group": 1, "vocab_size": 102400, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
}  # fmt: skip


@cache
def model(name: str, layers: int = 0, seq: int = 0) -> ModelSpec:
    """A row's model: of the catalogue, of the configs above, or one of llm-foundry's sizes with positions for `seq` tokens."""
    if name.startswith("MPT-"):
        d, heads, depth = MPT[name.removeprefix("MPT-")]
        config: dict[str, Any] = {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": d, "n_head": heads, "n_layer": depth,
            "n_positions": seq, "n_inner": 4 * d, "vocab_size": 50368, "activation_function": "gelu", "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }  # fmt: skip
    elif name in OTHERS:
        config = dict(OTHERS[name])
    else:
        config = dict(load_config(NAMES[name]))
    if layers:
        config["num_hidden_layers"] = layers
        if config.get("first_k_dense_replace"):
            config["first_k_dense_replace"] = 1
        config.pop("num_nextn_predict_layers", None)
    return from_config(config, name)


def named_model(name: str) -> ModelSpec | None:
    """A model by any of the names that sources use for it."""
    name = re.sub(r" \(.*\)$", "", name)
    if name in NAMES or name in OTHERS:
        return model(name)
    plain = name.lower().rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-").removesuffix("-hf")
    known = catalogue()
    for start in ("", "meta-"):
        for end in ("", "-v0.1", "-instruct"):
            if start + plain + end in known:
                return from_config(dict(load_config(start + plain + end)), name)
    return None


def named_gpu(text: str) -> Gpu:
    """The GPU that a source's words name, the largest part of its name first; ValueError where they name none."""
    words = re.split(r"[^a-z0-9]+", text.lower())

    def named(part: str) -> bool:
        return any(word.startswith(part.removesuffix("gb")) for word in words)

    found = [
        (sum(map(named, (*form, memory))), -place, name)
        for place, name in enumerate(gpus())
        for kind, *form, memory in (name.split("-"),)
        if named(kind) and (kind != "rtx" or all(map(named, form)))
    ]
    if not found:
        raise ValueError(f"no GPU is known by {text!r}")
    return gpu(max(found)[2])
