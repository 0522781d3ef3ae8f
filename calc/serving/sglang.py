"""SGLang: the fraction of the memory that weights and cache share, and the pools that the rest of it gives.

The rules are those of 0.5.23 (srt/arg_groups/memory_hook.py and srt/mem_cache/kv_cache_configurator.py), whose defaults depend on the
card's memory as nvidia-smi shows it in MiB.
"""

from __future__ import annotations

from typing import NamedTuple

from calc.breakdown import Component, Formula
from calc.errors import InputError
from calc.hardware import Gpu
from calc.model.mixers import LatentAttention
from calc.model.spec import ModelSpec
from calc.serving.cache import Cache
from calc.serving.capacity import Capacity
from calc.serving.plan import ServingPlan
from calc.serving.stages import Load
from calc.serving.vllm.extras import lora_slots
from calc.units import GiB, MiB

_SOURCE = "SGLang 0.5.23, srt/arg_groups/memory_hook.py"
_URL = "https://github.com/sgl-project/sglang"
_KV = ("bf16", "fp16", "fp8")
WINDOW_RATIO = 0.8  # tokens of a sliding layer's pool for each of a full one's (--swa-full-tokens-ratio)
STATE_RATIO = 0.9  # bytes of recurrent states for each of the full cache's (--mamba-full-memory-ratio)
# slots of a state that a request takes with the prefix cache: 3, and two that follow it with overlap (_calculate_mamba_ratio)
STATE_SLOTS = 5
# what CUDA, its libraries and NCCL hold before the weights are loaded: llm-d's logs of an H100 with 79.18 GiB
CONTEXT = int(0.61 * GiB)
CONTEXT_PARALLEL = int(1.54 * GiB)

# MiB of the card below which so many tokens of a prefill chunk and sequences of a decode graph hold, the latter by tp < 4 or more
_CLASSES = (
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 4096, 48, 160),
    (60 * 1024, 4096, 32, 160),
    (160 * 1024, 8192, 256, 512),
    (1 << 40, 16_384, 512, 512),
)
_PREFILL_SIZES = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 4097, 256),
    *range(4608, 1 << 17, 512),
)


class Static(NamedTuple):
    """Bytes that the memory is divided into: `activations` and `rest` are kept free, `context` is taken before."""

    fraction: float
    activations: int
    rest: int
    context: int


def defaults(plan: ServingPlan, gpu: Gpu | None) -> tuple[int, int]:
    """(tokens of a prefill chunk, sequences of the largest decode graph)."""
    memory = gpu.memory_bytes // MiB if gpu and gpu.memory_bytes else 0
    tokens, few, many = next((t, f, m) for most, t, f, m in _CLASSES if memory < most) if memory else (4096, 160, 160)
    sequences = few if plan.tp < 4 else many
    if plan.max_seqs:
        sequences = min(sequences, plan.max_seqs)
    return plan.max_batched_tokens or tokens, sequences


def mem_fraction_static(spec: ModelSpec, plan: ServingPlan, gpu: Gpu) -> float:
    """(memory - reserved) / memory in MiB, as given or by the rule."""
    if plan.mem_fraction_static is not None:
        return plan.mem_fraction_static
    assert gpu.memory_bytes
    memory = gpu.memory_bytes // MiB
    chunk, sequences = defaults(plan, gpu)
    latent = any(isinstance(mixer, LatentAttention) for kind in spec.layers.kinds for mixer in kind.mixers)
    reserved = 512 + 1.5 * max(chunk, 2048) + plan.tp * plan.pp / 8 * 1024 + 2 * sequences
    if plan.dp > 1:
        reserved += sequences * plan.dp * (4.5 if sequences > 300 else 3)
    most = min(8192, chunk) if latent or plan.pp > 1 else chunk
    graphs = sum(size <= most for size in _PREFILL_SIZES)
    reserved += 1536 if latent else 8 * graphs
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((memory - reserved) / memory, 3)


def static(spec: ModelSpec, plan: ServingPlan, gpu: Gpu) -> Static:
    """What is kept of the card's memory for activations and graphs, and what is gone before the weights come."""
    assert gpu.memory_bytes
    fraction = mem_fraction_static(spec, plan, gpu)
    chunk, _ = defaults(plan, gpu)
    kept = gpu.memory_bytes - int(gpu.memory_bytes * fraction)
    activations = min(kept, int(1.5 * max(chunk, 2048)) * MiB)
    context = int((CONTEXT if plan.tp == 1 else CONTEXT_PARALLEL) * fraction)
    return Static(fraction, activations, kept - activations, context)


def parts(
    spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, layers: range
) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    """The activations that the rule reserves, and the rest that stays free; nothing without a card, whose memory decides."""
    if gpu is None or gpu.memory_bytes is None:
        return (), ()
    found = static(spec, plan, gpu)
    tokens = max(defaults(plan, gpu)[0], 2048)
    per_token = Formula(r"<T> \cdot 1.5 \cdot 1048576", _SOURCE, _URL, ("a heuristic of 1.5 MiB a token of the chunk",))
    activations = Component("activations", found.activations, formula=per_token, numbers={"T": tokens})
    rest = Formula("<o>", _SOURCE, _URL, ("512 MiB, graphs, parallel ranks, and 10 GiB at least above 60 GiB",))
    context = Formula("<o>", "llm-d-benchmark: memory that is gone on an H100 before the engine starts", "")
    reserved = (
        Component("kept_free", found.rest, formula=rest, numbers={"o": found.rest}),
        Component("context", found.context, formula=context, numbers={"o": found.context}),
        *lora_slots(spec, plan, layers),  # allocated before the pools
    )
    return (activations,), reserved


def sglang(plan: ServingPlan, gpu: Gpu | None, cache: Cache, loads: tuple[Load, ...]) -> Capacity:
    """Tokens of the pool: what the static share leaves after the weights, over the bytes of a token."""
    if plan.kv_dtype not in _KV:
        raise InputError.of("kv_dtype", plan.kv_dtype, f"SGLang keeps its cache in {', '.join(_KV)}")
    given = plan.kv_memory_gib
    if given is None and (gpu is None or gpu.memory_bytes is None):
        return Capacity(None, None, None, None, None)
    limit = int(given * GiB) if given is not None else (gpu.memory_bytes or 0 if gpu else 0)
    rooms: list[tuple[int, int | None, int | None]] = []  # bytes, tokens, requests whose states have slots
    for load in loads:
        left = limit if given is not None else limit - load.total(0)
        full, window, state = _token_bytes(cache, load)
        if state:  # one slot pads the pool
            slots = max(0, int(left * STATE_RATIO / (1 + STATE_RATIO)) // state - 1)
            tokens = int(left - (slots + 1) * state) // full // plan.block_size * plan.block_size if full else None
            rooms.append((left, tokens, slots // (STATE_SLOTS if plan.prefix_caching else 1)))
        elif full or window:
            cell = full + WINDOW_RATIO * window if full else window
            rooms.append((left, int(max(0, left) / cell) // plan.block_size * plan.block_size, None))
    if not rooms:
        return Capacity(max(0, limit), None, None, None, None)
    budget = min(room for room, _, _ in rooms)
    tokens = min((max(0, held) for _, held, _ in rooms if held is not None), default=None)
    most = min((max(0, held) for _, _, held in rooms if held is not None), default=None)
    by_tokens = [] if tokens is None else [tokens / plan.context]
    concurrency = min(by_tokens + ([] if most is None else [float(most)]), default=None)
    short = min(room - plan.concurrency * load.sequence for (room, _, _), load in zip(rooms, loads, strict=False))
    fits = None if gpu is None or concurrency is None else concurrency >= plan.concurrency
    blocks = None if tokens is None else tokens // plan.block_size
    return Capacity(max(0, budget), blocks, tokens, concurrency, fits, limit, short)


def _token_bytes(cache: Cache, load: Load) -> tuple[int, int, int]:
    """Bytes of a token in full layers, in sliding ones, and of the states of one sequence."""
    full = window = state = 0
    for kind, count in zip(cache.kinds, load.counts, strict=True):
        for kept in kind:
            if kept.every > 1 or kept.of_prompt:
                raise InputError.of(
                    "engine", "sglang", "its pools of compressed and cross attention are not known here"
                )
            size = count * cache.tensor_bytes(kept, 1)
            if kept.fixed:
                state += size
            elif kept.most:
                window += size
            else:
                full += size
    return full, window, state
