"""The optimizer's step: bytes that it moves for the parameters of one rank, and what the host does when states live there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from calc.step_time.plan import TimePlan

# Passes over one state-sized tensor for a parameter. fused: reads gradient, weight, moments, writes the last three. foreach and loop:
# torch's AdamW operator by operator (decay 2, first moment 3, second 2 and 3, root 2, scale 2, epsilon 2, update 4).
_FUSED: Final[Mapping[str, float]] = {"adamw": 7, "sgd": 3, "momentum": 5}
_EAGER: Final[Mapping[str, float]] = {"adamw": 20, "sgd": 3, "momentum": 6, "adafactor": 22, "lion": 12, "muon": 8}
_NORM: Final = 3  # the gradients' norm is read once, and clipping reads and writes them
_EIGHT_BIT: Final = 8.0  # bytes: 8-bit moments read and written, weight and gradient of 16 bits
_FOUR_BIT: Final = 6.0

# DeepSpeed's Adam on the host: 0.22 s for 1 billion parameters, 2.57 s for 10 (ZeRO-Offload, arXiv 2101.06840, table 4)
HOST_ADAM: Final = 0.25e-9


def optimizer_bytes(plan: TimePlan) -> float:
    """Bytes moved for one parameter of the rank's own shard."""
    state = 2.0 if plan.recipe == "pure-bf16" else 4.0
    gradient = 2.0 if plan.recipe in ("pure-bf16", "mixed-16") else 4.0
    narrow = {"adamw-8bit": _EIGHT_BIT, "adamw-4bit": _FOUR_BIT, "paged-adamw": 7 * state}
    if plan.optimizer in narrow:
        moved = narrow[plan.optimizer]
    elif plan.optimizer_kernel == "fused" or plan.implementation == "fused":
        moved = _FUSED.get(plan.optimizer, _EAGER.get(plan.optimizer, 20)) * state
    else:
        moved = _EAGER.get(plan.optimizer, 20) * state
    copies = 2.0 if plan.recipe in ("megatron-bf16", "megatron-fp16", "mixed-16", "fp8") else 0.0
    return moved + copies + _NORM * gradient


def offload_bytes(plan: TimePlan) -> float:
    """Bytes that cross to the host and back for one parameter of the rank's shard: gradients out, weights in (16 bits each);
    with parameters there as well, their gathers too."""
    return {"none": 0.0, "optimizer": 4.0, "parameters": 8.0}[plan.offload]
