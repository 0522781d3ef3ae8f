"""Ways to use a model as people name them, each with the settings that it brings along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

CHECKPOINTED: Final = {"recompute": "full", "optimizer_kernel": "fused"}
ADAPTERS: Final = {**CHECKPOINTED, "recipe": "pure-bf16", "lora_targets": ("all-linear",)}


class Preset(NamedTuple):
    """A way: the command that answers it, the fields that it sets, and what these mean in a sentence."""

    command: Literal["train", "serve"]
    values: Mapping[str, Any]
    said: str


WAYS: Final[Mapping[str, Preset]] = {
    "full fine-tuning": Preset(
        "train",
        {**CHECKPOINTED, "recipe": "amp", "method": "full", "lora_targets": ()},
        "mixed precision (fp32 master weights: 16 bytes a parameter), activation checkpointing, fused AdamW",
    ),
    "full fine-tuning, bf16 only": Preset(
        "train",
        {**CHECKPOINTED, "recipe": "pure-bf16", "method": "full", "lora_targets": ()},
        "no fp32 copy (8 bytes a parameter: small updates are lost), activation checkpointing, fused AdamW",
    ),
    "LoRA": Preset(
        "train",
        {**ADAPTERS, "method": "lora"},
        "adapters on all linear layers of a bf16 base, activation checkpointing",
    ),
    "QLoRA": Preset(
        "train",
        {**ADAPTERS, "method": "qlora"},
        "adapters on all linear layers of a 4-bit base, activation checkpointing",
    ),
    "as published": Preset(
        "serve", {"weights": "auto"}, "the format that the checkpoint declares, bf16 where it declares none"
    ),
    "bf16": Preset("serve", {"weights": "bf16"}, "16-bit weights and KV cache"),
    "fp8": Preset("serve", {"weights": "fp8"}, "8-bit weights, 16-bit KV cache"),
    "int4 (AWQ)": Preset("serve", {"weights": "awq-int4"}, "4-bit weights, 16-bit KV cache"),
}

_DENSE_ALONE: Final = ("q_proj", "k_proj", "v_proj", "o_proj")  # where experts are one tensor, adapters go on attention


def ways_of(command: str) -> list[str]:
    """The ways that a command answers."""
    return [name for name, preset in WAYS.items() if preset.command == command]


def settings_of(way: str, experts: bool) -> dict[str, Any]:
    """The fields that a way sets, for a model with experts or without."""
    values = dict(WAYS[way].values)
    if experts and values.get("lora_targets"):
        values["lora_targets"] = _DENSE_ALONE
    return values
