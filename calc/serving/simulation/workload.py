"""The requests of a plan: when each arrives, and how long its prompt and its output are."""

from __future__ import annotations

import random

from calc.serving.simulation.plan import SimulationPlan
from calc.serving.simulation.replica import Request


def requests_of(plan: SimulationPlan, rate: float | None = None) -> list[Request]:
    """The requests in order of arrival; the same seed gives the same. `rate`: Poisson arrivals at that rate instead of the plan's."""
    draw = random.Random(plan.seed)
    count = len(plan.arrival_times) if plan.arrivals == "list" and rate is None else plan.requests
    arrivals = _arrivals(plan, rate, count, draw)
    found = []
    for at in range(count):
        prompt = _length(plan.prompt_lengths, plan.prompt_tokens, plan.length_spread or 0.0, at, draw)
        output = _length(plan.output_lengths, plan.output_tokens, plan.length_spread or 0.0, at, draw)
        shared = min(plan.shared_prefix, prompt)
        repeats = at >= plan.concurrency and plan.repeated_prompts and draw.random() < plan.repeated_prompts
        cached = prompt - 1 if repeats else min(max(plan.cached_prompt, shared if at else 0), prompt - 1)
        slot = at % plan.concurrency if arrivals is None else -1
        arrival = (0.0 if at < plan.concurrency else None) if arrivals is None else arrivals[at]
        found.append(Request(prompt, output, arrival, slot, cached, shared, plan.samples))
    return found


def _arrivals(plan: SimulationPlan, rate: float | None, count: int, draw: random.Random) -> list[float] | None:
    """Seconds of arrival; None for a closed loop."""
    rate = rate or plan.rate
    if rate is not None:
        now, found = 0.0, []
        for _ in range(count):
            now += draw.expovariate(rate)
            found.append(now)
        return found
    return sorted(plan.arrival_times) if plan.arrivals == "list" else None


def _length(given: tuple[int, ...], longest: int, spread: float, at: int, draw: random.Random) -> int:
    if given:
        return given[at % len(given)]
    return max(1, round(longest * (1 - spread * draw.random()))) if spread else longest
