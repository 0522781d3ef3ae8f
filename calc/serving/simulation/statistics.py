"""Means and tails of what a run gave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calc.serving.simulation.replica import Request, Trace

_TAILS = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Tail:
    """The mean and percentiles of a quantity in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def tail(values: list[float], weights: list[float] | None = None) -> Tail:
    """Mean and percentiles; with weights, a value counts as often as its weight says."""
    found = np.asarray(values, dtype=float)
    shares = np.ones_like(found) if weights is None else np.asarray(weights, dtype=float)
    if not shares.sum():
        return Tail(0.0, 0.0, 0.0, 0.0, 0.0)
    order = np.argsort(found)
    found, shares = found[order], shares[order]
    reached = np.cumsum(shares) / shares.sum()
    at = [float(found[min(int(np.searchsorted(reached, each / 100 - 1e-12)), len(found) - 1)]) for each in _TAILS]
    return Tail(float(np.average(found, weights=shares)), *at)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds to the first token, per further token (a request's mean), between two tokens, and from arrival to the last."""

    ttft: Tail
    tpot: Tail
    itl: Tail
    whole: Tail


def latencies(requests: list[Request], trace: Trace) -> Latencies:
    """The latencies of all requests; the time between tokens is of all tokens, each the length of its step."""
    pairs = list(zip(requests, trace.outcomes, strict=True))
    steps = [(seconds, count * tokens) for seconds, count, tokens, _ in trace.steps if tokens]
    return Latencies(
        tail([each.first - each.arrival for _, each in pairs]),
        tail([(each.last - each.first) / (request.output - 1) for request, each in pairs if request.output > 1]),
        tail([seconds for seconds, _ in steps], [weight for _, weight in steps]),
        tail([each.last - each.arrival for _, each in pairs]),
    )


@dataclass(frozen=True, slots=True)
class Waste:
    """Shares of the cache's slots that hold no token, over the life of all requests: with blocks, and with room reserved for the
    longest."""

    paged: float
    reserved: float


def waste(requests: list[Request], block: int, context: int) -> Waste:
    """Exact over the tokens of each request: from its prompt to its last, one step each."""
    used = blocks = reserved = 0
    for request in requests:
        first, last = request.prompt, request.prompt + request.output
        steps = last - first
        tokens = (first + 1 + last) * steps // 2
        used += tokens
        blocks += tokens + _unused(last, block) - _unused(first, block)
        reserved += max(context, last) * steps
    return Waste(1 - used / blocks if blocks else 0.0, 1 - used / reserved if reserved else 0.0)


def _unused(tokens: int, block: int) -> int:
    """Unused slots of the last block, summed over lengths 1 to `tokens`."""
    whole, rest = divmod(tokens, block)
    return whole * block * (block - 1) // 2 + rest * (block - 1) - rest * (rest - 1) // 2
