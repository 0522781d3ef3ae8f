"""How many blocks, tokens and requests vLLM's cache has room for."""

from __future__ import annotations

from calc.errors import InputError
from calc.hardware import Gpu
from calc.serving.cache import Cache
from calc.serving.capacity import Capacity, budget_of, limit_of
from calc.serving.plan import ServingPlan
from calc.serving.stages import Load
from calc.serving.vllm.blocks import Pool, kinds_of, pool_of
from calc.serving.vllm.step import step_limits
from calc.serving.vllm.versions import ASYNC_SINCE, UTILIZATION, version

KV_DTYPES = ("bf16", "fp16", "fp32", "fp8")


def vllm(plan: ServingPlan, gpu: Gpu | None, cache: Cache, loads: tuple[Load, ...]) -> Capacity:
    """Blocks, and requests of `context` tokens at once, as vLLM prints them; the tokens that it prints are their product."""
    if plan.kv_dtype not in KV_DTYPES:
        raise InputError.of("kv_dtype", plan.kv_dtype, f"vLLM keeps its cache in {', '.join(KV_DTYPES)}")
    number = version(plan.engine_version)
    share = UTILIZATION.at(number).value
    two = number >= ASYNC_SINCE if plan.async_scheduling is None else plan.async_scheduling
    batches = 2 if two else 1
    in_flight = batches * step_limits(plan, gpu)[0]
    rooms: list[tuple[int, Pool]] = []
    for load in loads:
        counts = _with_draft(load.counts, cache, load.draft_layers)
        kinds, budget = kinds_of(cache, counts), budget_of(plan, gpu, load, share)
        if kinds and budget is not None:
            rooms.append((budget, pool_of(kinds, plan, in_flight)))
    if not rooms:
        return Capacity(None, None, None, None, None)
    budget, pool = min(rooms, key=lambda room: room[0] // room[1].block_bytes / room[1].request_blocks)
    left = min(room - plan.concurrency * each.request_blocks * each.block_bytes for room, each in rooms)
    blocks = max(0, budget) // pool.block_bytes
    concurrency = blocks / pool.request_blocks
    return Capacity(
        max(0, budget),
        blocks,
        blocks * plan.context // pool.request_blocks,
        concurrency,
        left >= 0 if gpu else None,
        limit_of(plan, gpu, share),
        left,
        pool.request_blocks,
        pool.block_size,
    )


def _with_draft(counts: tuple[int, ...], cache: Cache, drafted: int) -> tuple[int, ...]:
    """The layers of each kind with a draft's next to them, which keep all tokens as the target's fullest kind does."""
    if not drafted:
        return counts
    full = [
        at for at, kind in enumerate(cache.kinds) if counts[at] and kind and not any(t.most or t.fixed for t in kind)
    ]
    at = full[-1] if full else len(counts) - 1
    return (*counts[:at], counts[at] + drafted, *counts[at + 1 :])
