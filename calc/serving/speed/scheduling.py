"""How an engine builds its steps: whether prompts share a step with tokens that decode, how many tokens one takes, who may start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from calc.hardware import Gpu
from calc.serving.plan import ServingPlan
from calc.serving.vllm.step import step_limits
from calc.serving.vllm.versions import OVERLAP_SINCE, is_v0, version
from calc.units import GiB


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The rules of one engine.

    `mixes`: prompts are computed in the same step as tokens that decode; if not, they come first and decoding waits.
    `chunks`: a prompt may be split over steps. `step_tokens` and `sequences` bound one step; `by_memory` has both by the least memory
    of a GPU, largest first. `graph_tokens`: steps with prompts up to so many tokens run in pieces of CUDA graphs, larger ones launch
    every operation from the host. `reserves` is the share of its output that a request must have cache for before it starts.
    `ahead`: steps that a request waits for which comes at a step's end, as in a closed loop: the host misses the step that starts
    then, and with two batches in flight the one after it. `poll_steps`: decode steps between two looks at what has come.
    `streams`: steps whose tokens go to the client together, the first one with them: of TensorRT-LLM that is inferred from published
    runs, whose first tokens come so much later, and not read in its source. `gathers`: prompts wait until so many are there, at most
    `gather_steps` decode steps (TensorRT-LLM balances its data-parallel ranks so). `static`: a batch ends before the next starts.
    """

    mixes: bool
    chunks: bool
    step_tokens: int
    sequences: int
    source: str
    by_memory: tuple[tuple[int, int, int], ...] = ()
    reserves: float = 0.0
    poll_steps: int = 1
    ahead: int = 2
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
    graph_tokens=512,
    source="vLLM v1: running sequences first, then prompts in chunks, up to max_num_batched_tokens (v1/core/sched/scheduler.py)",
)
SGLANG = Scheduling(
    mixes=False,
    chunks=True,
    step_tokens=8192,
    sequences=4096,
    by_memory=((160 * GiB, 16_384, 4096), (60 * GiB, 8192, 4096), (35 * GiB, 4096, 4096), (0, 2048, 4096)),
    reserves=0.1,
    ahead=2,
    source="SGLang: prompts first, up to chunked_prefill_size, then a decode step (managers/scheduler.py, enable_mixed_chunk off; "
    "new_token_ratio falls to 0.1; defaults in server_args.py; event_loop_overlap is the default)",
)
TRTLLM = Scheduling(
    mixes=True,
    chunks=False,
    step_tokens=8192,
    sequences=2048,
    reserves=1.0,
    ahead=2,
    source="TensorRT-LLM: whole prompts in one step with the sequences that decode, up to max_num_tokens; GUARANTEED_NO_EVICT; "
    "the overlap scheduler is the default",
)
_ENGINES: Mapping[str, Scheduling] = {"sglang": SGLANG, "tensorrt-llm": TRTLLM}


def engine_rules(engine: str) -> Scheduling:
    """The rules of an engine; vLLM's for one whose own are not known here."""
    return _ENGINES.get(engine, VLLM)


def scheduling(plan: ServingPlan, gpu: Gpu | None) -> Scheduling:
    """The rules of the plan's engine, with the defaults of its version for that GPU."""
    rules = engine_rules(plan.engine)
    if rules is VLLM:
        return _vllm(plan, gpu)
    memory = gpu.memory_bytes or 0 if gpu else 0
    fitting = (row for row in rules.by_memory if memory >= row[0])
    _, tokens, sequences = next(fitting, (0, rules.step_tokens, rules.sequences))
    return replace(rules, step_tokens=plan.max_batched_tokens or tokens, sequences=plan.max_seqs or sequences)


def _vllm(plan: ServingPlan, gpu: Gpu | None) -> Scheduling:
    """vLLM by version: the first engine computes whole prompts before it decodes (vllm/core/scheduler.py)."""
    number = version(plan.engine_version)
    tokens, sequences = step_limits(plan, gpu)
    overlaps = number >= OVERLAP_SINCE if plan.async_scheduling is None else plan.async_scheduling
    first = is_v0(number, gpu.compute_capability if gpu else None)
    return replace(
        VLLM, step_tokens=tokens, sequences=sequences, ahead=2 if overlaps else 1, mixes=not first, chunks=not first
    )
