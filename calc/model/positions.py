"""How far rotary scaling stretches a model's positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

# these leave max_position_embeddings at the stretched value already
_DONE: Final = ("llama3", "longrope", "su", "default", "mrope", "proportional")
_DONE_MODELS: Final = ("gemma3", "gemma3_text", "gemma3n_text")


def scaled_positions(config: Mapping[str, Any], positions: int) -> int:
    """The positions that `rope_scaling` (or `rope_parameters`) makes of a model's, 0 where it stretches none.

    YaRN stretches its `original_max_position_embeddings`, linear and dynamic scaling those of the model: `factor` times, as vLLM
    derives a model's longest context (vllm/config/model.py).
    """
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text}
    found = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(found, dict) or config.get("model_type") in _DONE_MODELS:
        return 0
    groups = [found] if "factor" in found else [group for group in found.values() if isinstance(group, dict)]
    return max((_stretched(group, positions) for group in groups), default=0)


def _stretched(group: Mapping[str, Any], positions: int) -> int:
    factor, kind = group.get("factor"), group.get("rope_type") or group.get("type")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor) or kind in _DONE:
        return 0
    original = group.get("original_max_position_embeddings") if kind in ("yarn", "deepseek_yarn") else None
    start = original if type(original) is int and 0 < original <= 2**30 else positions
    return int(min(max(factor, 0), 2**20) * start)
