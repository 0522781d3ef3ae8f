"""The models that workloads build: the user's, or small ones that run anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calc.catalogue import load_config
from calc.errors import InputError
from calc.model.spec import ModelSpec
from measure.setting import Setting


def llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, positions: int = 8192
) -> dict[str, Any]:
    """The config of a small Llama with an untied head."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
    }


# GQA and an intermediate size and vocabulary off the powers of two, to be no special case
SMALL: Mapping[str, Mapping[str, Any]] = {
    "small": llama(256, 696, 6, 8, 2, 4099),
    "medium": llama(1024, 2744, 12, 16, 4, 32003),
}


def config_of(setting: Setting) -> dict[str, Any]:
    """The config of the model that was asked for, or of the small one of the size."""
    return load_config(setting.model) if setting.model else dict(SMALL[setting.size])


def name_of(setting: Setting) -> str:
    """What a row's case calls the model."""
    return setting.model or f"{setting.size} Llama"


def with_depth(config: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The config cut to its first `depth` decoder layers, its lists of one entry a layer with it; nested text configs too."""
    cut = dict(config)
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        layers = cut.get(key)
        if isinstance(layers, int):
            cut[key] = depth
            lists = {name: value for name, value in cut.items() if isinstance(value, list) and len(value) == layers}
            cut |= {name: value[:depth] for name, value in lists.items() if name != "architectures"}
            return cut
    if isinstance(cut.get("text_config"), dict):
        cut["text_config"] = with_depth(cut["text_config"], depth)
    return cut


def two_depths(spec: ModelSpec) -> tuple[int, int]:
    """Two depths of the model that differ by one period of its pattern of layers, as shallow as can be.

    What the first has beyond its periods (dense layers before the experts) is in both. InputError when nothing repeats.
    """
    pattern: Sequence[int] = spec.layers.pattern
    found = []
    for period in range(1, len(pattern) // 2 + 1):
        start = len(pattern) - period
        while start > 0 and pattern[start - 1] == pattern[start - 1 + period]:
            start -= 1
        if start + 2 * period <= len(pattern):
            found.append((start + 2 * period, start + period))
    if not found:
        raise InputError(
            f"--model: the {len(pattern)} layers of {spec.name} do not repeat, so two depths cannot be told apart"
        )
    deep, shallow = min(found)
    return shallow, deep
