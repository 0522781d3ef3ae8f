"""Users against speed in closed form: a closed loop of so many requests in flight, each followed by the next when it ends.

All functions take numbers or numpy arrays. The event simulator (`calc.serving.simulation`) follows every request instead; the tests
hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from calc.serving.speed.scheduling import Scheduling


class Times(Protocol):
    """Seconds of a step; see `StepTimes.mixed`."""

    def mixed(self, sequences: Any, context: Any, prefills: Any, new: Any, cached: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Load:
    """What the requests are like: `concurrency` in flight, tokens of prompt and output (means), `cached` prompt tokens found in the
    cache, `spread`: lengths are drawn from 1 - spread to 1 of the longest. `rounds`: requests that each user sends one after
    another, of which the first all arrive at once. `fits`: sequences that the cache holds."""

    concurrency: Any
    prompt: Any
    output: Any
    cached: Any = 0
    spread: float = 0.0
    rounds: float = 10.0
    fits: Any = np.inf
    tokens_a_step: float = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds to the first token and for each further one (means over all requests), and tokens/s of all sequences.

    `step` is a decode step without prompts, `prefill` the time that one prompt adds, `queued` what of `ttft` is waiting for the
    cache, `late` the time between tokens that 5 % of them exceed.
    """

    ttft: Any
    tpot: Any
    tokens_per_s: Any
    step: Any
    prefill: Any
    queued: Any
    late: Any


def pace(load: Load, rules: Scheduling, times: Times) -> Pace:
    """The means of a run. A prompt delays every sequence that decodes, whether it shares their step or goes before it; requests
    that arrive at once wait for each other's prompts; what does not fit waits for the whole of another's time (Little's law)."""
    running = np.minimum(np.minimum(load.concurrency, load.fits), rules.sequences)
    context = load.prompt + load.output / 2
    step = times.mixed(running, context, 0, 0, 0)
    new = np.maximum(load.prompt - load.cached, 1)
    budget = np.maximum(rules.step_tokens - (running if rules.mixes else 0), 1)
    packed = np.clip(np.floor(budget / new), 1, running)  # prompts of one step
    chunks = np.ceil(new / budget) if rules.chunks else np.ceil(new / np.maximum(new, budget))
    beside = running if rules.mixes else 0
    base = step if rules.mixes else 0.0

    def prefill(prompts: Any) -> Any:
        """Seconds that so many prompts of one step add."""
        middle = load.cached + (chunks - 1) / 2 * (new / chunks)
        return chunks * (times.mixed(beside, context, prompts, new / chunks, middle) - base)

    alone, together = prefill(1), prefill(packed)
    decodes = np.maximum(load.output - 1, 1) / load.tokens_a_step
    steps = np.ceil(running / packed)
    burst = (steps + 1) / 2 * together + base
    locked = load.spread == 0.0
    if locked and not rules.mixes:  # all end in the same step, so every round is a burst
        first = burst
        delay = (steps - 1) / 2 * together / np.maximum(decodes, 1)
    else:
        each, others = (together, running - packed) if locked else (alone, running - 1)
        each_cost = each / (packed if locked else 1)
        share = np.minimum(running * each_cost / (decodes * step + running * each_cost), 0.95)
        waits = step * rules.poll_steps / 2 + share / (2 * (1 - share)) * each
        steady = waits + each + base
        first = (burst + (load.rounds - 1) * steady) / load.rounds
        delay = others * each_cost / decodes
    tpot = (step + delay) / load.tokens_a_step
    whole = first + tpot * np.maximum(load.output - 1, 0)
    queued = np.maximum(load.concurrency - running, 0) / running * whole
    late = np.where(running * chunks / np.maximum(decodes, 1) > 0.05, step + alone / chunks, step)
    return Pace(first + queued, tpot, running * load.output / whole, step, alone, queued, late)
