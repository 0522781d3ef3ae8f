"""GGUF files for tests: tiny models of transformers, named and described as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(
    path: Path,
    tensors: Iterable[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]],
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    tokens: int = 0,
    **options: Any,
) -> Path:
    """A file of zeros with these tensors, written with the gguf package. Shapes are in elements, as (output, input)."""
    writer = gguf.GGUFWriter(path, arch, **options)
    for key, value in (metadata or {}).items():
        {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)](key, value)
    if tokens:
        writer.add_token_list([f"<token {at}>" for at in range(tokens)])
        writer.add_token_scores([0.0] * tokens)
        writer.add_token_types([1] * tokens)
        writer.add_token_merges([f"a b{at}" for at in range(tokens)])
    for name, shape, kind in tensors:
        count, size = gguf.GGML_QUANT_SIZES[kind]
        rows = (*shape[:-1], shape[-1] // count * size)
        writer.add_tensor(name, np.zeros(rows, np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(config: Any, arch: str, model: Any) -> tuple[list[tuple[str, tuple[int, ...], Any]], dict[str, Any]]:
    """(tensors, metadata) of a transformers model as convert_hf_to_gguf.py writes them, every tensor F32."""
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch), config.num_hidden_layers
    )
    tensors = []
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, shape in _parts(name, tuple(tensor.shape)):
            fused_bias = part.endswith("proj_bias")
            found = names.get_name(
                part.removesuffix("_bias") if fused_bias else part, try_suffixes=(".weight", ".bias")
            )
            assert found, part
            if not found.endswith((".weight", ".bias")):
                found += ".bias" if fused_bias else ".weight"
            tensors.append((found, shape, gguf.GGMLQuantizationType.F32))
    return tensors, _metadata(config, arch)


def _parts(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """A fused tensor of all experts, as the two parts that the converter writes; the input is 64 wide."""
    if "experts.gate_up_proj" not in name:
        return [(name, shape)]
    width = shape[1] // 2 if name.endswith("_bias") or shape[2] == 64 else shape[2] // 2
    part = (shape[0], width) if name.endswith("_bias") else (shape[0], width, 64)
    return [(name.replace("gate_up_proj", f"{kind}_proj"), part) for kind in ("gate", "up")]


_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _metadata(config: Any, arch: str) -> dict[str, Any]:
    found = {f"{arch}.{key}": getattr(config, name, None) for key, name in _KEYS.items()}
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    found[f"{arch}.expert_count"] = experts
    if arch == "gpt-oss":
        found[f"{arch}.expert_feed_forward_length"] = config.intermediate_size
    return {key: value for key, value in found.items() if value is not None}
