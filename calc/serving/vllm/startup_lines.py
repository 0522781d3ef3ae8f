"""The lines that vLLM prints at start-up, with the figures that are computed: to be held against a real log."""

from __future__ import annotations

from collections.abc import Mapping

from calc.serving.capacity import Capacity
from calc.serving.plan import ServingPlan
from calc.serving.vllm.versions import GRAPHS_COUNTED, UTILIZATION, version
from calc.units import GiB

_LOADED = ("rotary_table", "expert_padding")  # what the log counts with the weights


def startup_lines(
    plan: ServingPlan, memory: int | None, weights: int, activations: int, reserved: Mapping[str, int], room: Capacity
) -> tuple[str, ...]:
    """The lines of the plan's version; () where the budget is not known. `memory` is the card's, `reserved` by part."""
    if room.budget is None or room.blocks is None or room.tokens is None or room.concurrency is None:
        return ()
    number = version(plan.engine_version)
    loaded = weights + sum(reserved.get(name, 0) for name in _LOADED)
    graphs = sum(value for name, value in reserved.items() if "graph" in name)
    lines = [f"Model loading took {loaded / GiB:.2f} GiB memory"]
    if number < (0, 8) and memory is not None:
        share = plan.utilization(UTILIZATION.at(number).value)
        total = f"total_gpu_memory ({memory / GiB:.2f}GiB) x gpu_memory_utilization ({share:.2f})"
        lines += [
            f"the current vLLM instance can use {total} = {memory * share / GiB:.2f}GiB",
            f"model weights take {loaded / GiB:.2f}GiB; non_torch_memory takes {reserved.get('non_torch', 0) / GiB:.2f}GiB; "
            f"PyTorch activation peak memory takes {activations / GiB:.2f}GiB; the rest of the memory reserved for KV Cache is "
            f"{room.budget / GiB:.2f}GiB.",
            f"# GPU blocks: {room.blocks}",
        ]
    else:
        if GRAPHS_COUNTED.at(number).value and graphs:
            lines.append(f"Estimated CUDA graph memory: {graphs / GiB:.2f} GiB total")
        lines += [
            f"Available KV cache memory: {room.budget / GiB:.2f} GiB",
            f"GPU KV cache size: {room.tokens:,} tokens",
        ]
    lines.append(f"Maximum concurrency for {plan.context:,} tokens per request: {room.concurrency:.2f}x")
    if room.concurrency < 1:
        lines.append(_refusal(plan, room))
    return tuple(lines)


def _refusal(plan: ServingPlan, room: Capacity) -> str:
    """What it says when not one request of the context fits."""
    if not room.budget:
        return "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
    assert room.concurrency
    needed = room.budget / room.concurrency
    return (
        f"ValueError: To serve at least one request with the models's max seq len ({plan.context}), ({needed / GiB:.2f} GiB KV cache "
        f"is needed, which is larger than the available KV cache memory ({room.budget / GiB:.2f} GiB)"
    )
