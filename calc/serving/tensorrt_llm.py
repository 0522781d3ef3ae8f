"""TensorRT-LLM: a share of the memory that is free once the model is loaded and has run its largest step."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from calc.breakdown import Component, Formula
from calc.errors import InputError
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.activations import activations
from calc.serving.cache import Cache
from calc.serving.capacity import Capacity, logical
from calc.serving.plan import ServingPlan
from calc.serving.sglang import CONTEXT, CONTEXT_PARALLEL
from calc.serving.stages import Load

_SOURCE = (
    "TensorRT-LLM 1.0, llmapi/llm_args.py: free_gpu_memory_fraction 0.9, max_num_tokens 8,192, max_batch_size 2,048"
)
_URL = "https://github.com/NVIDIA/TensorRT-LLM"
_KV = ("bf16", "fp16", "fp8", "int8")
_FRACTION, _TOKENS, _SEQUENCES = 0.9, 8192, 2048


def parts(
    spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, layers: range
) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    """The largest step's tensors; and what CUDA holds, with the share of the free memory that stays free."""
    largest = {
        "max_batched_tokens": plan.max_batched_tokens or _TOKENS,
        "max_seqs": plan.max_seqs or _SEQUENCES,
        "concurrency": plan.max_seqs or _SEQUENCES,
    }
    step = activations(spec, plan.model_copy(update=largest), last=layers.stop == spec.num_hidden_layers)
    context = CONTEXT if plan.tp == 1 else CONTEXT_PARALLEL
    formula = Formula("<o>", "llm-d-benchmark: memory that is gone on an H100 before an engine starts", "")
    return step, (Component("context", context, formula=formula, numbers={"o": context}),)


def tensorrt_llm(plan: ServingPlan, gpu: Gpu | None, cache: Cache, loads: tuple[Load, ...]) -> Capacity:
    """Blocks of the fraction of what is free, at most `max_tokens`. InputError for a cache format that it does not have."""
    if plan.kv_dtype not in _KV:
        raise InputError.of("kv_dtype", plan.kv_dtype, f"TensorRT-LLM keeps its cache in {', '.join(_KV)}")
    share = Fraction(str(plan.free_gpu_memory_fraction or _FRACTION))
    if gpu is None or gpu.memory_bytes is None or plan.kv_memory_gib is not None:
        return logical(plan, gpu, cache, loads, 1.0)
    kept = []
    for load in loads:
        free = max(0, gpu.memory_bytes - load.total(0))
        formula = Formula("<o>", _SOURCE, _URL)
        stays = free - int(free * share)
        part = Component("kept_free", stays, formula=formula, numbers={"o": stays})
        kept.append(replace(load, reserved=(*load.reserved, part)))
    found = logical(plan, gpu, cache, tuple(kept), 1.0)
    if plan.max_tokens is None or found.tokens is None or found.tokens <= plan.max_tokens:
        return found
    most = plan.max_tokens
    return replace(found, tokens=most, blocks=most // plan.block_size, concurrency=most / plan.context)
