"""How many tokens llama.cpp's cache has room for."""

from __future__ import annotations

from dataclasses import replace

from calc.errors import InputError
from calc.hardware import Gpu
from calc.serving.cache import Cache
from calc.serving.capacity import Capacity, logical, usable_bytes
from calc.serving.plan import ServingPlan
from calc.serving.stages import Load
from calc.units import GiB

_KV = ("bf16", "fp16", "fp32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def llama_cpp(plan: ServingPlan, gpu: Gpu | None, cache: Cache, loads: tuple[Load, ...]) -> Capacity:
    """llama.cpp: a stream for each sequence, in cells of 256 and without blocks. InputError for a cache format that it does not have, and
    for values in blocks without flash attention."""
    values = plan.cache_type_v or plan.kv_dtype
    for field, kept in (("kv_dtype", plan.kv_dtype), ("cache_type_k", plan.cache_type_k), ("cache_type_v", values)):
        if kept is not None and kept not in _KV:
            raise InputError.of(field, kept, f"llama.cpp keeps its cache in {', '.join(_KV)}")
    if values.startswith("q") and not plan.flash_attention:
        field = "cache_type_v" if plan.cache_type_v else "kv_dtype"
        raise InputError.of(field, values, "llama.cpp keeps values in blocks with flash attention alone")
    if gpu is None or not plan.memories_gib:
        return replace(logical(plan, gpu, cache, loads, share_of(gpu)), blocks=None)
    cards = [replace(gpu, memory_bytes=int(size * GiB)) for size in plan.memories_gib]
    each = [logical(plan, card, cache, (load,), share_of(card)) for card, load in zip(cards, loads, strict=True)]
    tightest = min(each, key=lambda found: found.headroom or 0)
    tokens = [found.tokens for found in each if found.tokens is not None]
    return replace(
        tightest,
        blocks=None,
        budget=min(found.budget or 0 for found in each),
        tokens=min(tokens, default=None),
        concurrency=min((found.concurrency for found in each if found.concurrency is not None), default=None),
    )


def share_of(gpu: Gpu | None) -> float:
    """The share of a GPU that it fills unless told otherwise: all but 1 GiB (common.h, fit_params_target)."""
    if gpu is None or gpu.memory_bytes is None:
        return 1.0
    return max(0.0, 1 - GiB / usable_bytes(gpu, gpu.memory_bytes))
