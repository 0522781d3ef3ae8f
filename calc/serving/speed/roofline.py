"""How fast: prefill against the compute roof, decode against the memory roof (and each against the other)."""

from __future__ import annotations

from dataclasses import dataclass

from calc.flops import token_flops
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.cache import Cache
from calc.serving.plan import ServingPlan
from calc.serving.weights import StoredWeights


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds to the first token and for each further one, tokens/s of all sequences, and what bounds decode.

    A roofline: no communication, no kernel launches, no scheduling. None where a fact of the GPU is missing,
    and but for the first for an encoder, which generates nothing.
    """

    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None
    bound: str | None
    weights_read_bytes: int
    kv_read_bytes: int
    notes: tuple[str, ...]


def speed(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, stored: StoredWeights, cache: Cache) -> Speed:
    """The roofline of one prompt's prefill and of one decode step at full concurrency.

    Decode is at the mean cache length of a generation: the prompt and half of the output. A token passes the stages one after
    another, so their bytes add up; pipelining several batches is not counted.
    """
    length = plan.prompt_tokens + plan.output // 2
    read = decode_weights(spec, stored, plan.concurrency)
    kv = plan.concurrency * cache.sequence_bytes(spec.layers.counts, length)
    if gpu is None:
        return Speed(None, None, None, None, read, kv, ())
    notes = []
    peak = next((peak for kind in stored.format.compute if (peak := gpu.peak_flops(kind))), None)
    if peak is None:
        notes.append(gpu.why_no_peak(stored.format.compute[0]))
    if gpu.memory_bandwidth is None:
        notes.append(f"no source gives the memory bandwidth of {gpu.name}")
    rate = peak * plan.tp * plan.compute_efficiency if peak else None
    bandwidth = gpu.memory_bandwidth * plan.bandwidth_efficiency if gpu.memory_bandwidth else None
    if not rate or not bandwidth:
        return Speed(None, None, None, None, read, kv, tuple(notes))
    everything = decode_weights(spec, stored, plan.prompt_tokens)
    ttft = max(prefill_flops(spec, plan.prompt_tokens) / rate, everything / bandwidth)
    if not spec.generates:
        return Speed(ttft, None, None, None, read, kv, tuple(notes))
    compute = plan.concurrency * token_flops(spec, length, False).forward / rate
    memory = (read + kv) / bandwidth
    tpot = max(compute, memory)
    bound = "compute" if compute > memory else "memory"
    return Speed(ttft, tpot, plan.concurrency / tpot, bound, read, kv, tuple(notes))


def prefill_flops(spec: ModelSpec, tokens: int) -> int:
    """Forward FLOPs of a prompt: every token through the layers, the last one alone through the head."""
    one = token_flops(spec, tokens, True)
    return one.forward * tokens - one.head * (tokens - 1)


def decode_weights(spec: ModelSpec, stored: StoredWeights, tokens: int) -> int:
    """Bytes of weights that a step of so many tokens reads, all stages together, without the input embedding and the towers.

    What an earlier layer holds is read again. Of E experts with K for a token, a batch of B tokens reads E (1 - (1 - K/E)^B) in
    expectation, were routing uniform.
    """
    read = stored.layer_bytes + stored.head_bytes
    for sort, count in stored.sort_counts:
        read += count * stored.reread[sort]
        experts = stored.experts[sort]
        if experts.bytes:
            read -= round(count * experts.bytes * (1 - experts.active / experts.copies) ** tokens)
    return read
