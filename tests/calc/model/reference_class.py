"""The independent check of a count: the class that a config names, built by the installed transformers on the meta device."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

VISION = re.compile(r"vision_|visual\.|multi_modal_projector|embed_vision|image_newline|connector\.|mm_projector")

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


def build(class_name: str, config: dict[str, Any]) -> Any:
    """The model of that class on the meta device: shapes without memory."""
    import torch
    import transformers

    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        return model_class(model_class.config_class.from_dict(copy.deepcopy(config)))


def unique(model: Any) -> Iterator[tuple[str, Any]]:
    """Each parameter once, with its name; tied ones count once."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def count(model: Any) -> int:
    return sum(parameter.numel() for _, parameter in unique(model))


def vision_count(model: Any) -> int:
    return sum(parameter.numel() for name, parameter in unique(model) if VISION.search(name))
