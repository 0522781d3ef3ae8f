"""The ideal: prefill against the compute roof, decode against the memory roof (and each against the other)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from calc.breakdown import Breakdown
from calc.flops import token_flops
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.cache import Cache
from calc.serving.plan import ServingPlan
from calc.serving.weights import StoredWeights


@dataclass(frozen=True, slots=True)
class Ends:
    """One end of a band, or another estimate of the same: seconds to the first token and for each further one, tokens/s of all."""

    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds to the first token and for each further one, tokens/s of all sequences, and what bounds decode.

    `source` says whose times these are; for "roofline" there is no communication, no launch and no scheduling in them, and the fields
    after it are empty. None where a fact of the GPU is missing, and but for the first for an encoder, which generates nothing.
    `prefill_s` is what one prompt adds to the steps of the others, `queued_s` the part of the time to the first token that is
    waiting for room in the cache, `itl_p95_s` the time between tokens that one in twenty exceeds, `ideal` the roofline.
    """

    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None
    bound: str | None
    weights_read_bytes: int
    kv_read_bytes: int
    notes: tuple[str, ...]
    source: str = "roofline"
    low: Ends | None = None
    high: Ends | None = None
    itl_p95_s: float | None = None
    prefill_s: float | None = None
    queued_s: float | None = None
    decode_step: Callable[[], Breakdown] | None = field(default=None, compare=False, repr=False)
    ideal: Ends | None = None
    cost_per_million_tokens: float | None = None

    @property
    def step(self) -> Breakdown | None:
        """The seconds of a decode step, operation by operation."""
        return self.decode_step() if self.decode_step else None

    def as_json(self) -> dict[str, Any]:
        """What stands next to `ttft_s`, `tpot_s` and `tokens_per_s` in the answer."""
        step = self.step
        return {
            "times": self.source,
            "low": asdict(self.low) if self.low else None,
            "high": asdict(self.high) if self.high else None,
            "itl_p95_s": self.itl_p95_s,
            "prefill_s": self.prefill_s,
            "queued_s": self.queued_s,
            "step_s": step.total if step else None,
            "step_components": step.components() if step else [],
            "roofline": asdict(self.ideal) if self.ideal else None,
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "weights_read_bytes": self.weights_read_bytes,
            "kv_read_bytes": self.kv_read_bytes,
        }


def roofline(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, stored: StoredWeights, cache: Cache) -> Speed:
    """The roofline of one prompt's prefill and of one decode step at full concurrency.

    Decode is at the mean cache length of a generation: the prompt and half of the output. A token passes the stages one after
    another, so their bytes add up; pipelining several batches is not counted.
    """
    length = plan.prompt_tokens + plan.output_tokens // 2
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
