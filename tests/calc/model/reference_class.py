"""Which class of the installed transformers has the tensors of a config that names a class it lacks."""

from __future__ import annotations

from typing import Any

# What transformers lacks, or reads under other names, has a class with the same tensors: (class, fields that make it so)
_CHATGLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 13696,
    "attention_bias": True,
    "pad_token_id": None,
}
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "baichuan-7b": ("LlamaForCausalLM", {}),
    "baichuan-13b-base": ("LlamaForCausalLM", {}),
    "baichuan2-13b-chat": ("LlamaForCausalLM", {}),
    "chatglm3-6b": ("GlmForCausalLM", _CHATGLM | {"num_hidden_layers": 28}),
    "glm-4-9b-chat": ("GlmForCausalLM", _CHATGLM | {"vocab_size": 151_552}),
    # the class wants a float where the published config has 1
    "dbrx-instruct": (
        "DbrxForCausalLM",
        {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
    ),
    "internlm-7b": ("LlamaForCausalLM", {"attention_bias": True, "num_key_value_heads": 32}),
    "internlm2-7b": ("LlamaForCausalLM", {}),
    "orion-14b": ("StableLmForCausalLM", {}),
    "minicpm-moe-8x2b": ("MixtralForCausalLM", {"num_local_experts": 8}),
    "minimax-m3": ("MiniMaxM3VLForCausalLM", {}),
    "phi-1_5": ("PhiForCausalLM", {"hidden_size": 2048, "intermediate_size": 8192}),
    "qwen-7b": ("Qwen2ForCausalLM", {"intermediate_size": 11008}),
    "phi-2": ("PhiForCausalLM", {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32}),
}
