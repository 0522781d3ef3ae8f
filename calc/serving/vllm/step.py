"""How many tokens and sequences one step of vLLM takes at most, by version and GPU."""

from __future__ import annotations

from calc.hardware import Gpu
from calc.serving.plan import ServingPlan
from calc.serving.vllm.versions import is_v0, version
from calc.units import GiB

# first version, driver's memory from which it holds, tokens, sequences of the server (vllm/engine/arg_utils.py); best first
_LIMITS = (
    ((0, 33), 160 * GiB, 16_384, 1024),
    ((0, 8), 70 * GiB, 8192, 1024),
    ((0, 6), 0, 2048, 256),
)
_LONG = 32_768  # the first engine turns chunked prefill on above so many tokens of context
_CHUNK_OF_V0 = ((0, 7), 2048, 512)  # from that version on, before it (vllm/config.py)


def step_limits(plan: ServingPlan, gpu: Gpu | None) -> tuple[int, int]:
    """(tokens, sequences) of one step: as the plan says, or the server's defaults.

    An A100 counts as a small card from 0.9 on, and GB10 always. Without chunked prefill (before 0.8) a step takes a whole context.
    """
    number = version(plan.engine_version)
    memory = gpu.memory_bytes or 0 if gpu else 0
    if gpu and ((gpu.name.startswith("a100") and number >= (0, 9)) or gpu.name.startswith("gb10")):
        memory = 0
    tokens, sequences = next((t, s) for since, least, t, s in _LIMITS if number >= since and memory >= least)
    if is_v0(number, gpu.compute_capability if gpu else None):
        since, chunk, earlier = _CHUNK_OF_V0
        tokens = max(plan.context, 2048) if plan.context <= _LONG else chunk if number >= since else earlier
    tokens = plan.max_batched_tokens or tokens
    return tokens, plan.max_seqs or min(sequences, tokens)
