"""Times of a call, many of them: the median with the 20th and the 80th percentile, never a single shot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import NamedTuple

import torch

_WARM_UP = 5  # calls before the first that counts: kernels compiled, caches and clocks settled
_LEAST, _MOST = 10, 10_000  # timed calls


class Spread(NamedTuple):
    """Seconds of one call: 20th percentile, median, 80th percentile."""

    p20: float
    median: float
    p80: float


def spread(times: Sequence[float]) -> Spread:
    """The three of a list of at least two times."""
    fifths = quantiles(times, n=5, method="inclusive")
    return Spread(fifths[0], median(times), fifths[3])


def time_call(
    call: Callable[[], object],
    device: torch.device,
    seconds: float = 1.0,
    warm_up: int = _WARM_UP,
    least: int = _LEAST,
) -> Spread:
    """Time a call again and again for about that many seconds, `least` times at least (a call of seconds wants fewer).

    On a GPU by its own events, so that launch gaps on the host do not count.
    """
    for _ in range(warm_up):
        call()
    return spread((_on_gpu if device.type == "cuda" else _on_host)(call, seconds, least))


def _on_host(call: Callable[[], object], seconds: float, least: int) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < end and len(times) < _MOST):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _on_gpu(call: Callable[[], object], seconds: float, least: int) -> list[float]:
    """Not run on a GPU yet."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < end and len(times) < _MOST):
        events = [(_event(), _event()) for _ in range(least)]
        for start, stop in events:
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(stop) / 1e3 for start, stop in events]  # elapsed_time is in milliseconds
    return times


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
