"""How much cache a GPU has room for, by the rules of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from calc.hardware import Gpu
from calc.serving.cache import Cache
from calc.serving.plan import ServingPlan
from calc.serving.stages import Load
from calc.units import GB, GiB


@dataclass(frozen=True, slots=True)
class Capacity:
    """The cache's budget in bytes on the stage with the least room, and what it holds; None where the GPU's memory is unknown.

    `tokens` is None also when no layer's cache grows with the tokens; `concurrency` is sequences of the plan's context.
    `limit` is what the plan may take, `headroom` what it leaves of that on the tightest stage, below zero where it does not fit;
    of the cache alone where the plan states its room. `request_blocks` is what one such sequence takes of `blocks`, and
    `block_size` the tokens of one, where the engine decides.
    """

    budget: int | None
    blocks: int | None
    tokens: int | None
    concurrency: float | None
    fits: bool | None
    limit: int | None = None
    headroom: int | None = None
    request_blocks: int | None = None
    block_size: int | None = None

    @property
    def needed(self) -> int | None:
        """Bytes that the plan takes of `limit`."""
        return None if self.limit is None or self.headroom is None else self.limit - self.headroom

    @property
    def sequences(self) -> int | None:
        """Whole sequences of the plan's context."""
        return None if self.concurrency is None else int(self.concurrency)


UTILIZATION = 0.92  # vLLM's of today, for want of an engine's own


def limit_of(plan: ServingPlan, gpu: Gpu | None, utilization: float = UTILIZATION) -> int | None:
    """memory x utilisation (as given, or `utilization`), or what the plan states for the cache alone."""
    if plan.kv_memory_gib is not None:
        return int(_exact(plan.kv_memory_gib) * GiB)
    if gpu is None or gpu.memory_bytes is None:
        return None
    return int(_exact(plan.utilization(utilization)) * usable_bytes(gpu, gpu.memory_bytes))


@lru_cache(maxsize=256)
def _exact(value: float) -> Fraction:
    """The decimal number that was written, and not its nearest binary one."""
    return Fraction(str(value))


_WORKING_SET = ((36 * GB, Fraction(2, 3)), (1 << 60, Fraction(3, 4)))  # memory up to which, Metal's share of it


def usable_bytes(gpu: Gpu, memory: int) -> int:
    """What a program may take of a device's memory: on Apple's machines Metal's recommended working set, 2/3 of the memory up to 36 GB
    and 3/4 above (recommendedMaxWorkingSetSize, as llama.cpp and MLX print it); iogpu.wired_limit_mb raises it."""
    if gpu.vendor != "Apple":
        return memory
    return int(memory * next(share for most, share in _WORKING_SET if memory <= most))


def budget_of(plan: ServingPlan, gpu: Gpu | None, load: Load, utilization: float = UTILIZATION) -> int | None:
    """memory x utilisation - weights - activations - what the engine reserves, or what the plan states; below zero when that is
    too much."""
    limit = limit_of(plan, gpu, utilization)
    if limit is None or plan.kv_memory_gib is not None:
        return limit
    return limit - load.weights - load.activation_bytes - load.reserved_bytes


def logical(
    plan: ServingPlan, gpu: Gpu | None, cache: Cache, loads: tuple[Load, ...], utilization: float = UTILIZATION
) -> Capacity:
    """The bytes of the tensors alone: tokens fill the budget to the last byte, and blocks are whole."""
    rooms = [(load, budget) for load in loads if (budget := budget_of(plan, gpu, load, utilization)) is not None]
    if not rooms:
        return Capacity(None, None, None, None, None)
    tightest: dict[tuple[int, ...], int] = {}  # stages with the same layers differ in their budget alone
    for load, budget in rooms:
        tightest[load.counts] = min(tightest.get(load.counts, budget), budget)
    held = [cache.tokens_held(counts, max(0, budget), plan.streams) for counts, budget in tightest.items()]
    tokens = min((count for count in held if count is not None), default=None)
    concurrency = min((max(0, budget) / load.sequence for load, budget in rooms if load.sequence), default=None)
    left = min(budget - plan.streams * load.sequence for load, budget in rooms)
    return Capacity(
        max(0, min(budget for _, budget in rooms)),
        None if tokens is None else tokens // plan.block_size,
        tokens,
        concurrency,
        left >= 0 if gpu else None,
        limit_of(plan, gpu, utilization),
        left,
    )
