"""How an engine builds its steps: whether prompts share a step with tokens that decode, how many tokens one takes, who may start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from calc.hardware import Gpu
from calc.units import GiB


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The rules of one engine.

    `mixes`: prompts are computed in the same step as tokens that decode; if not, they come first and decoding waits.
    `chunks`: a prompt may be split over steps. `step_tokens` and `sequences` bound one step; `by_memory` has both by the least memory
    of a GPU, largest first. `graph_tokens`: steps with prompts up to so many tokens run in pieces of CUDA graphs, larger ones launch
    every operation from the host. `reserves` is the share of its output that a request must have cache for before it starts.
    `ahead`: steps already on their way when a request comes. `poll_steps`: decode steps between two looks at what has come.
    `streams`: steps whose tokens go to the client together. `gathers`: prompts wait until so many are there, at most `gather_steps`
    decode steps (TensorRT-LLM balances its data-parallel ranks so). `static`: a batch ends before the next starts.
    """

    mixes: bool
    chunks: bool
    step_tokens: int
    sequences: int
    source: str
    by_memory: tuple[tuple[int, int, int], ...] = ()
    reserves: float = 0.0
    poll_steps: int = 1
    ahead: int = 1
    streams: int = 1
    graph_tokens: int = 0
    gathers: int = 1
    gather_steps: int = 0
    static: bool = False


VLLM = Scheduling(
    mixes=True,
    chunks=True,
    step_tokens=8192,
    sequences=1024,
    by_memory=((160 * GiB, 16_384, 1024), (70 * GiB, 8192, 1024), (0, 2048, 256)),
    graph_tokens=512,
    source="vLLM v1: running sequences first, then prompts in chunks, up to max_num_batched_tokens (v1/core/sched/scheduler.py; "
    "defaults in engine/arg_utils.py, where an A100 counts as small)",
)
SGLANG = Scheduling(
    mixes=False,
    chunks=True,
    step_tokens=8192,
    sequences=4096,
    by_memory=((160 * GiB, 16_384, 4096), (60 * GiB, 8192, 4096), (35 * GiB, 4096, 4096), (0, 2048, 4096)),
    reserves=0.1,
    source="SGLang: prompts first, up to chunked_prefill_size, then a decode step (managers/scheduler.py, enable_mixed_chunk off; "
    "new_token_ratio falls to 0.1; defaults in server_args.py)",
)
TRTLLM = Scheduling(
    mixes=True,
    chunks=False,
    step_tokens=8192,
    sequences=2048,
    reserves=1.0,
    source="TensorRT-LLM: whole prompts in one step with the sequences that decode, up to max_num_tokens; GUARANTEED_NO_EVICT",
)
_ENGINES: Mapping[str, Scheduling] = {"sglang": SGLANG, "tensorrt-llm": TRTLLM}


def scheduling(engine: str, gpu: Gpu | None) -> Scheduling:
    """The rules of an engine, with its defaults for that GPU; vLLM's for an engine whose own are not known here."""
    rules = _ENGINES.get(engine, VLLM)
    memory = gpu.memory_bytes or 0 if gpu else 0
    if rules is VLLM and gpu and gpu.name.startswith("a100"):
        memory = 0
    fitting = (row for row in rules.by_memory if memory >= row[0])
    _, tokens, sequences = next(fitting, (0, rules.step_tokens, rules.sequences))
    return replace(rules, step_tokens=tokens, sequences=sequences)
