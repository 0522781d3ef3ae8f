"""How many tokens llama.cpp's cache has room for."""

from __future__ import annotations

from dataclasses import replace

from calc.errors import InputError
from calc.hardware import Gpu
from calc.serving.cache import Cache
from calc.serving.capacity import Capacity, logical
from calc.serving.plan import ServingPlan
from calc.serving.stages import Load

_LLAMA_CPP_KV = ("bf16", "fp16", "fp32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def llama_cpp(plan: ServingPlan, gpu: Gpu | None, cache: Cache, loads: tuple[Load, ...]) -> Capacity:
    """llama.cpp: a stream for each sequence, in cells of 256 and without blocks. InputError for a cache format that it does not have."""
    if plan.kv_dtype not in _LLAMA_CPP_KV:
        raise InputError.of("kv_dtype", plan.kv_dtype, f"llama.cpp keeps its cache in {', '.join(_LLAMA_CPP_KV)}")
    return replace(logical(plan, gpu, cache, loads), blocks=None)
