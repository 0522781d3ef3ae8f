"""How an engine builds its steps: whether prompts share a step with tokens that decode, how many tokens one takes, who may start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The rules of one engine.

    `mixes`: prompts are computed in the same step as tokens that decode; if not, they come first and decoding waits.
    `chunks`: a prompt may be split over steps. `step_tokens` and `sequences` bound one step (of one data-parallel rank).
    `reserves` is the share of its output that a request must have cache for before it starts. `poll_steps`: decode steps between
    two looks at what has arrived. `late_steps`: steps until the host sees what a step made (overlapped scheduling). `gathers`: prompts
    wait until so many are there, at most `gather_steps` decode steps (TensorRT-LLM balances its data-parallel ranks so).
    """

    mixes: bool
    chunks: bool
    step_tokens: int
    sequences: int
    reserves: float = 0.0
    poll_steps: int = 1
    late_steps: int = 0
    gathers: int = 1
    gather_steps: int = 0
    static: bool = False
    source: str = ""


VLLM = Scheduling(
    mixes=True,
    chunks=True,
    step_tokens=8192,
    sequences=1024,
    source="vLLM v1, v1/core/sched/scheduler.py: running requests first, then prompts in chunks, up to max_num_batched_tokens",
)
SGLANG = Scheduling(
    mixes=False,
    chunks=True,
    step_tokens=8192,
    sequences=4096,
    reserves=0.1,
    late_steps=1,
    source="SGLang, managers/scheduler.py: a batch of prompts up to chunked_prefill_size before the next decode step "
    "(enable_mixed_chunk is off); new_token_ratio ends at 0.1",
)
TRTLLM = Scheduling(
    mixes=True,
    chunks=False,
    step_tokens=8192,
    sequences=2048,
    reserves=1.0,
    late_steps=1,
    source="TensorRT-LLM, capacity scheduler GUARANTEED_NO_EVICT; whole prompts with the tokens that decode, up to max_num_tokens",
)
SCHEDULING: Mapping[str, Scheduling] = {"vllm": VLLM, "logical": VLLM, "sglang": SGLANG, "trtllm": TRTLLM, "llama.cpp": VLLM}
