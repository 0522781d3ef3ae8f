"""From a GGUF file's metadata to the config of the class that it was converted from, exact or refused.

The keys are llama.cpp's (gguf-py/gguf/constants.py); what a converter does not write is read from the tensors: the vocabulary's
size, a tied head, biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from calc.errors import InputError
from calc.model.families.class_names import class_of_type
from calc.sources.gguf import GgufHeader

# key after the architecture's name -> field of config.json
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_MUST = ("block_count", "embedding_length", "attention.head_count")
_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_LOCAL_MOE = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}


@dataclass(frozen=True, slots=True)
class _Kind:
    """The transformers model type of an architecture, its own keys besides `_FIELDS`, and the fields whose values its
    converter assumes."""

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)


_MIXTRAL = _Kind("mixtral", _LOCAL_MOE)
_KINDS = {
    "llama": _Kind("llama"),
    "qwen2": _Kind("qwen2", given={"use_sliding_window": False}),
    "qwen2moe": _Kind(
        "qwen2_moe",
        _MOE,
        {"use_sliding_window": False, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    "qwen3": _Kind("qwen3", given={"use_sliding_window": False}),
    "qwen3moe": _Kind(
        "qwen3_moe",
        _MOE,
        {"use_sliding_window": False, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    "gemma": _Kind("gemma"),
    "gemma2": _Kind("gemma2"),
    "gemma3": _Kind("gemma3_text", given={"sliding_window_pattern": 6}),
    "phi3": _Kind("phi3"),
    "olmo2": _Kind("olmo2"),
    "gpt-oss": _Kind(
        "gpt_oss",
        _LOCAL_MOE | {"expert_feed_forward_length": "intermediate_size"},
        {"attention_bias": True},
    ),
}


def config_of(header: GgufHeader, where: str) -> dict[str, Any]:
    """The config of the class that the file was converted from. InputError names an architecture that is not understood, or a key
    that is missing."""
    name = header.metadata.get("general.architecture")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InputError.of("general.architecture", name, f"a GGUF file's config is read for {', '.join(_KINDS)}")
    if name == "llama" and header.metadata.get("llama.expert_count"):
        kind = _MIXTRAL
    table = header.shapes.get("token_embd.weight", ())
    if len(table) != 2:
        raise InputError(
            f"MODEL: {where}: it has no token_embd.weight of two dimensions, so it is no language model", "MODEL"
        )
    missing = next((key for key in _MUST if header.metadata.get(f"{name}.{key}") is None), None)
    if missing:
        raise InputError(f"{name}.{missing}: missing in the metadata of {where}", f"{name}.{missing}")
    read = {
        field: header.metadata[f"{name}.{key}"]
        for key, field in {**_FIELDS, **kind.keys}.items()
        if header.metadata.get(f"{name}.{key}") is not None
    }
    return {
        "architectures": [class_of_type(kind.model_type)],
        "model_type": kind.model_type,
        "vocab_size": table[0],
        "tie_word_embeddings": "output.weight" not in header.shapes,
        **_biases(header),
        **read,
        **kind.given,
    }


def _biases(header: GgufHeader) -> dict[str, bool]:
    """Llama's flags for biases, where the tensors show them."""
    return {
        "attention_bias": "blk.0.attn_output.bias" in header.shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in header.shapes,
    }
