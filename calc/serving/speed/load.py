"""Users against speed in closed form: a closed loop of so many requests in flight, each followed by the next when it ends.

All functions take numbers or numpy arrays. The event simulator (`calc.serving.simulation`) follows every request instead; the tests
hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from calc.serving.speed.scheduling import Scheduling


class Times(Protocol):
    """Seconds of a step; see `StepTimes.mixed`."""

    def mixed(self, sequences: Any, context: Any, prefills: Any, new: Any, cached: Any) -> Any: ...


# Seconds to split one token of a prompt's text, on one core: byte-level BPE of the tokenizers library, 1.9 to 3.1 µs for 1,024 and
# 8,192 tokens of a 16,000-word vocabulary (measured with tokenizers on a server CPU). Engines do it before a prompt queues, one by one.
TOKENISE = 2.5e-6


_ROUNDS = 10  # after so many rounds the ends are taken as spread as they then are


@dataclass(frozen=True, slots=True)
class Load:
    """What the requests are like: `concurrency` in flight, tokens of prompt and output (means), `cached` prompt tokens found in the
    cache, `spread`: lengths are drawn from 1 - spread to 1 of the longest, None where that is not known. `rounds`: requests that each
    user sends one after another, of which the first all arrive at once; 0: a steady stream. `repeated`: the share of those after the
    first that compute no prompt. `fits`: sequences that the cache holds."""

    concurrency: Any
    prompt: Any
    output: Any
    cached: Any = 0
    spread: float | None = 0.0
    rounds: int = 10
    fits: Any = np.inf
    repeated: float = 0.0
    tokens_a_step: float = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds to the first token and for each further one (means over all requests), and tokens/s of all sequences.

    `step` is a decode step without prompts, `prefill` the time that one prompt adds, `queued` what of `ttft` is waiting for the
    cache, `late` the time between tokens that 5 % of them exceed. `between`: the two paces that this is the middle of.
    """

    ttft: Any
    tpot: Any
    tokens_per_s: Any
    step: Any
    prefill: Any
    queued: Any
    late: Any
    between: tuple[Pace, ...] = ()


# How far lengths vary where nobody says: RANDOM_RANGE_RATIO 0.8 of the largest public series of serving runs (InferenceX, README). The
# other end is what load generators send unless told otherwise: equal lengths (vllm bench serve, AIPerf).
USUAL_SPREAD = 0.2


def pace(load: Load, rules: Scheduling, times: Times) -> Pace:
    """The means of a run. A prompt delays every sequence that decodes, whether it shares their step or goes before it; requests
    that arrive at once wait for each other's prompts; what does not fit waits for the whole of another's time (Little's law).

    Where the lengths' spread is not known: the geometric mean of equal and of varying lengths, which is wrong by the same factor
    whichever of the two it is."""
    running = np.minimum(np.minimum(load.concurrency, load.fits), rules.sequences)
    context = load.prompt + load.output / 2
    step = times.mixed(running, context, 0, 0, 0)
    prompts = _Prompts(load, rules, times, running, context, step)
    if load.spread is not None:
        return _pace(load, rules, prompts)
    return _middle(*(_pace(replace(load, spread=spread), rules, prompts) for spread in (0.0, USUAL_SPREAD)))


def _pace(load: Load, rules: Scheduling, prompts: _Prompts) -> Pace:
    """The means of a run whose lengths vary as `load` says."""
    running, step = prompts.running, prompts.step
    decodes = np.maximum(load.output - 1, 1) / load.tokens_a_step
    if rules.static:
        return _static(load, prompts, running, prompts.context, decodes)
    hold, group = _collected(rules, running / decodes)
    burst = prompts.burst()
    locked = load.spread == 0.0 and load.rounds > 0
    if locked and not rules.mixes:  # all end in the same step, so every round is a burst
        first = burst
        delay = (burst - prompts.together) / decodes
    else:
        group = np.maximum(group, prompts.started_together() if locked else 1)
        each = prompts.seconds_of_mean(group) if locked else prompts.seconds(group)
        cost = each / group * (1 - load.repeated)
        delay = np.maximum(running - group, 0) * cost / decodes
        looks = rules.ahead + (rules.poll_steps - 1) / 2 + hold
        others = 1 - 1 / running  # one user alone finds the engine idle
        waits = prompts.later_rounds(load.spread or 0.0, step + delay, decodes, cost, each, looks) + prompts.base
        steady = waits * others + each * (1 - load.repeated) + load.prompt * TOKENISE
        first = (burst + (load.rounds - 1) * steady) / load.rounds if load.rounds else steady
    pass_ = step + delay
    late_tokens = (rules.streams - 1) * load.tokens_a_step
    first = first + (rules.streams - 1) * pass_
    tpot = pass_ / load.tokens_a_step * np.maximum(1 - late_tokens / np.maximum(load.output - 1, 1), 0)
    whole = first + tpot * np.maximum(load.output - 1, 0)
    queued = np.maximum(load.concurrency - running, 0) / running * whole
    late = np.where(running * prompts.chunks / decodes > 0.05, step + prompts.alone / prompts.chunks, step)
    return Pace(first + queued, tpot, running * load.output / whole, step, prompts.alone, queued, late)


def _middle(equal: Pace, varied: Pace) -> Pace:
    """The geometric mean of two paces."""
    names = ("ttft", "tpot", "tokens_per_s", "step", "prefill", "queued", "late")
    middle = {name: np.sqrt(getattr(equal, name) * getattr(varied, name)) for name in names}
    return Pace(**middle, between=(equal, varied))


def _static(load: Load, prompts: _Prompts, running: Any, context: Any, decodes: Any) -> Pace:
    """Batches of a fixed size: all prompts, then decode steps until the longest output is done; the places of those that end early stay
    empty.

    The longest of n outputs drawn evenly from 1 - spread to 1 of the most is 1 - spread / (n + 1) of it in expectation.
    """
    steps = np.ceil(running / prompts.packed)
    spread = load.spread or 0.0
    longest = (1 - spread / (running + 1)) / (1 - spread / 2)
    first = (steps + 1) / 2 * prompts.together
    step = prompts.times.mixed(running / longest, context, 0, 0, 0)
    batch = steps * prompts.together + longest * decodes * step
    delay = np.maximum(steps - 1, 0) / 2 * prompts.together / decodes
    tpot = (step + delay) / load.tokens_a_step
    queued = np.maximum(load.concurrency - running, 0) / running * batch
    return Pace(first + queued, tpot, running * load.output / batch, step, prompts.alone, queued, step)


class _Prompts:
    """What prompts cost: `packed` of them go into one step, each in `chunks` steps; `base` is what such a step takes without them.
    Nothing here but `later_rounds` knows how lengths vary."""

    def __init__(self, load: Load, rules: Scheduling, times: Times, running: Any, context: Any, step: Any) -> None:
        self.load, self.times, self.context, self.running, self.step = load, times, context, running, step
        self.new = np.maximum(load.prompt - load.cached, 1)
        budget = np.maximum(rules.step_tokens - (running if rules.mixes else 0), 1)
        self.packed = np.clip(np.floor(budget / self.new), 1, running)
        self.chunks = np.ceil(self.new / budget) if rules.chunks else np.ones_like(self.new + budget)
        self.mixes, self.decoding = rules.mixes, running if rules.mixes else 0 * running
        self.base = step if rules.mixes else 0.0
        self.alone, self.together = self.seconds(1), self.seconds(self.packed)

    def seconds(self, prompts: Any) -> Any:
        """Seconds that so many prompts add; more than fit into one step follow in others."""
        passes = np.ceil(prompts / self.packed) * self.chunks
        in_one = np.minimum(prompts, self.packed)
        new = self.new / self.chunks
        cached = self.load.cached + (self.chunks - 1) / 2 * new
        return passes * (self.times.mixed(self.decoding, self.context, in_one, new, cached) - self.base)

    def seconds_of_mean(self, prompts: Any) -> Any:
        """Seconds of steps with so many prompts on average."""
        most = np.maximum(np.ceil(prompts), 1)
        rest = (prompts - 1) / np.maximum(most - 1, 1)
        return self.alone + (self.seconds(most) - self.alone) * rest

    def rounds(self) -> Any:
        """The rounds after the first, along an axis of their own before those of the load."""
        count = max(2, min(self.load.rounds, _ROUNDS)) - 1
        return np.arange(1, count + 1).reshape(-1, *(1,) * np.ndim(self.running + self.new))

    def started_together(self) -> Any:
        """Prompts in the step of a prompt after the first round, on average, where all lengths are equal.

        What started together ends together and is sent together, but the tokenizer lets one prompt through at a time: the first start
        while the others are split, and from then on end by themselves. So a single group loses in each round those that come within a
        step. Where users are more than one step takes, such steps follow each other and catch up: they stay full.
        """
        group, come = self.packed, np.maximum(np.floor(self.step / (self.load.prompt * TOKENISE)), 1)
        apart = np.minimum(self.rounds() * come, group)
        seen = (apart * np.minimum(come, group) + (group - apart) ** 2) / group
        return np.where(self.running > group, group, seen.mean(axis=0))

    def later_rounds(self, spread: float, each_pass: Any, decodes: Any, cost: Any, each: Any, looks: Any) -> Any:
        """Mean seconds that a prompt waits in the rounds after the first.

        What started together ends together, but for the spread of the lengths, which adds up over the rounds as independent draws do:
        in round n the prompts come within sqrt(n) spreads of a cycle and the time that the burst took. If that is less than they
        need, they queue; if it is more, as in an M/D/1 queue, but no longer than so few can (a random walk's mean, 0.4 sqrt(n)). Equal
        lengths keep their order and do not queue; nor do prompts that hold decoding up, as nothing ends meanwhile: they wait for steps
        of the mean length, `each_pass`. The others' steps are as long as those prompts make them.
        """
        if not self.mixes:
            return looks * each_pass
        load, step = self.load, self.step
        cost = np.minimum(cost, self.together / self.packed * (1 - load.repeated))  # those that queue share a step
        cycle, span = each_pass * decodes, np.ceil(self.running / self.packed) * (self.together + self.base)
        work, n = self.running * cost, self.rounds() if spread and load.rounds else 1
        window = np.minimum(cycle, np.sqrt(n) * spread * cycle + span) if load.rounds else cycle
        busy = np.minimum(work / np.maximum(window, 1e-9), 0.99)
        waited = np.minimum(step / (1 - busy), step + self.together)
        if load.rounds and not spread:  # one group: each prompt comes while the one before it is computed
            return looks * np.where(self.running > self.packed, waited, step + self.alone)
        random = np.minimum(busy / (2 * (1 - busy)) * each, 0.4 * np.sqrt(self.running) * cost)
        found = looks * waited + np.maximum(work - window, 0) / 2 + random
        return found.mean(axis=0) if np.ndim(n) else found

    def burst(self) -> Any:
        """Mean seconds to the first token where all arrive at once: prompts pass the tokenizer, then the steps, one after another."""
        steps = np.ceil(self.running / self.packed)
        decoding = self.base / 2 * (1 - 1 / self.running)
        slowest = np.maximum(self.together + decoding, self.packed * self.load.prompt * TOKENISE)
        return (steps + 1) / 2 * slowest


def _collected(rules: Scheduling, rate: Any) -> tuple[Any, Any]:
    """Steps that a prompt is held back on average, and how many are then computed together, where `rate` of them come in a step;
    those that come between two looks are computed together as well."""
    if not rules.gather_steps:
        return 0.0, np.maximum(rate * (rules.poll_steps - 1), 1)
    group = np.clip(rate * rules.gather_steps, 1, max(rules.gathers, 1))
    hold = np.minimum(rules.gather_steps, rules.gathers / rate)
    return hold * (group + 1) / (2 * group), group
