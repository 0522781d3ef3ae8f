"""MLX (mlx-lm) on Apple's unified memory: a cache in steps of 256 tokens, prompts in chunks, and Metal's working set as the limit."""

from __future__ import annotations

from dataclasses import replace

from calc.breakdown import Component, Formula
from calc.errors import InputError
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.activations import activations
from calc.serving.cache import Cache, cache_of
from calc.serving.capacity import Capacity, logical
from calc.serving.plan import ServingPlan
from calc.serving.stages import Load, kind_counts

PREFILL = 2048  # mlx_lm/generate.py, prefill_step_size
_SOURCE = "mlx-lm 0.32, models/cache.py, RotatingKVCache: while prompts are computed a window holds a chunk next to its own tokens"
_URL = "https://github.com/ml-explore/mlx-lm"
_KV = ("bf16", "fp16", "fp32", "int8", "int4")


def parts(
    spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, layers: range
) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    """A chunk of the prompt with the last token's logits, and what windows hold of it; nothing is reserved."""
    chunk = min(plan.max_batched_tokens or PREFILL, plan.prompt_tokens)
    step = plan.model_copy(update={"max_batched_tokens": chunk * plan.concurrency})
    found = activations(spec, step, last=layers.stop == spec.num_hidden_layers)
    cache, counts = cache_of(spec, plan), kind_counts(spec, layers)
    held = plan.concurrency * sum(
        count * cache.tensor_bytes(kept, chunk - 1)
        for kind, count in zip(cache.kinds, counts, strict=True)
        for kept in kind
        if kept.most
    )
    if not held:
        return found, ()
    formula = Formula("<o>", _SOURCE, _URL)
    return (*found, Component("window_chunks", held, formula=formula, numbers={"o": held})), ()


def mlx(plan: ServingPlan, gpu: Gpu | None, cache: Cache, loads: tuple[Load, ...]) -> Capacity:
    """Tokens in the machine's working set. InputError for several devices, for a cache format that it does not have, and for windows in
    whole numbers."""
    for field, ranks in (("tp", plan.tp), ("pp", plan.pp), ("dp", plan.dp)):
        if ranks > 1:
            raise InputError.of(field, ranks, "MLX is modelled on one machine")
    if plan.kv_dtype not in _KV:
        raise InputError.of("kv_dtype", plan.kv_dtype, f"MLX keeps its cache in {', '.join(_KV)} (--kv-bits 8 and 4)")
    windows = any(kept.most for kind in cache.kinds for kept in kind)
    if windows and plan.kv_dtype.startswith("int"):
        raise InputError.of(
            "kv_dtype", plan.kv_dtype, "mlx-lm does not quantise the cache of windows; use bf16 or fp16"
        )
    return replace(logical(plan, gpu, cache, loads, 1.0), blocks=None)
