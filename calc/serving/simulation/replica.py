"""One replica, event by event: requests arrive, wait, prefill in chunks, decode together, are preempted, and leave.

Between two events nothing but the contexts changes, so all decode steps in between are taken at once, at their mean context.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from calc.errors import InputError
from calc.serving.speed.load import TOKENISE
from calc.serving.speed.scheduling import Scheduling


class Times(Protocol):
    """Seconds of a step: `sequences` that decode at a mean context, `prefills` prompts of `new` tokens each after `cached` ones."""

    def mixed(self, sequences: float, context: float, prefills: int, new: float, cached: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens of prompt and output. `arrival` in seconds; None: when the request before it in its `slot` has ended (closed loop).

    `cached` tokens of the prompt need not be computed; `shared` of these lie in blocks that other requests use too. `samples`
    outputs are made from one prompt, whose blocks they share until they write. `tokenised`: it comes as tokens, not as text.
    """

    prompt: int
    output: int
    arrival: float | None = 0.0
    slot: int = -1
    cached: int = 0
    shared: int = 0
    samples: int = 1
    tokenised: bool = False


@dataclass(slots=True)
class Outcome:
    """What became of a request: seconds when it arrived, was split into tokens, and gave its first and its last token, and how often it
    was preempted."""

    arrival: float
    ready: float = 0.0
    first: float = -1.0
    last: float = -1.0
    preempted: int = 0


@dataclass(slots=True)
class Trace:
    """All outcomes, and the steps: (seconds of one, how many, tokens that the decoding sequences make in one, prompts in one).

    `most_cached` is the most tokens that the cache held, unused slots of last blocks included.
    """

    outcomes: list[Outcome]
    steps: list[tuple[float, int, float, int]] = field(default_factory=list)
    seconds: float = 0.0
    most_cached: float = 0.0
    preemptions: int = 0


@dataclass(slots=True)
class _Decoding:
    """A request that decodes: the step and the tokens of one of its samples when it started."""

    step: int
    tokens: float


class _Replica:
    """The state of a run. `step` counts decode steps; `context` sums the tokens that the decoding sequences attend to, `held` those
    that the cache keeps for them, `owed` those that they have still to make."""

    def __init__(
        self, requests: list[Request], rules: Scheduling, times: Times, cache: float, block: int, made: float
    ) -> None:
        self.requests, self.rules, self.times = requests, rules, times
        self.cache, self.block, self.a_step = cache, block, made
        self.trace = Trace([Outcome(request.arrival or 0.0) for request in requests])
        self.opened = 0  # the step at which a static batch began
        self.now, self.step, self.passes, self.last_look, self.held_since = 0.0, 0, 0, 0, -1
        self.sequences, self.context, self.held, self.owed, self.prefilling = 0, 0.0, 0.0, 0.0, 0.0
        arrivals = [which for which, request in enumerate(requests) if request.arrival is not None]
        self.tokenizer = 0.0  # when it is free
        self.future: deque[int] = deque()
        for which in sorted(arrivals, key=lambda which: requests[which].arrival or 0.0):
            self._arrive(which, requests[which].arrival or 0.0)
        self.arrived: deque[tuple[int, int]] = deque()  # with the passes until then
        self.waiting: deque[int] = deque()
        self.started: dict[int, list[float]] = {}  # tokens computed, tokens to compute
        self.decoding: dict[int, _Decoding] = {}
        self.ends: list[tuple[int, int]] = []  # a heap of (step, request)
        self.made: dict[int, float] = {}  # tokens of one sample before a preemption
        self.slots: dict[int, deque[int]] = {}
        for which, request in enumerate(requests):
            if request.arrival is None:
                self.slots.setdefault(request.slot, deque()).append(which)
        self.cache -= max((request.shared for request in requests), default=0)  # the common start is kept once

    def run(self) -> Trace:
        while True:
            self._look()
            if self._room() < 1 and len(self.decoding) > 1:
                self._preempt()
                continue
            batch = self._prompts()
            if batch:
                self._prefill(batch)
            elif self.decoding:
                self._decode()
            elif self.waiting or self.arrived:
                which = self.waiting[0] if self.waiting else self.arrived[0][0]
                raise InputError(
                    f"request {which} needs more than the {self.cache:,.0f} tokens that the cache holds", "context"
                )
            elif self.future:
                self.now = max(self.now, self.trace.outcomes[self.future[0]].ready)
            else:
                self.trace.seconds = self.now
                return self.trace

    # arrivals

    def _arrive(self, which: int, moment: float) -> None:
        """The request is sent; its text passes the tokenizer, which takes one at a time."""
        outcome, request = self.trace.outcomes[which], self.requests[which]
        outcome.arrival = moment
        self.tokenizer = max(self.tokenizer, moment) + (0.0 if request.tokenised else request.prompt * TOKENISE)
        outcome.ready = self.tokenizer if not request.tokenised else moment
        self.future.append(which)

    def _look(self) -> None:
        """Queue what has arrived, where the engine looks for requests before this step: what came during a step has waited for that
        one, and with two batches in flight lets the next one pass as well."""
        while self.future and self.trace.outcomes[self.future[0]].ready <= self.now:
            self.arrived.append((self.future.popleft(), self.passes))
        idle = not (self.decoding or self.started)
        if self.step - self.last_look < self.rules.poll_steps and not idle:
            return
        self.last_look = self.step
        while self.arrived and (idle or self.passes - self.arrived[0][1] >= self.rules.ahead - 1):
            self.waiting.append(self.arrived.popleft()[0])

    def _gathering(self) -> bool:
        """Whether the prompts that wait are held back for more to join them."""
        rules = self.rules
        if rules.static:
            if not (self.decoding or self.started):
                self.opened = self.step
            return self.step > self.opened  # the batch has begun to decode
        if self.started or not self.decoding or len(self.waiting) >= rules.gathers:
            self.held_since = -1
            return False
        if self.held_since < 0:
            self.held_since = self.step
        if self.step - self.held_since < rules.gather_steps:
            return True
        self.held_since = -1
        return False

    # prompts

    def _prompts(self) -> list[tuple[int, float]]:
        """The prompts of the next step, with the new tokens of each."""
        if not (self.waiting or self.started) or self._gathering():
            return []
        rules = self.rules
        budget: float = rules.step_tokens - (self.sequences if rules.mixes else 0)
        batch: list[tuple[int, float]] = []
        for which, (done, todo) in self.started.items():
            new = min(todo - done, budget)
            if new > 0:
                batch.append((which, new))
                budget -= new
        while self.waiting and budget > 0 and self.sequences + len(self.started) < rules.sequences:
            which = self.waiting[0]
            todo = self._todo(which)
            if (todo > budget and not rules.chunks and (batch or todo <= rules.step_tokens)) or not self._fits(which):
                break
            self.waiting.popleft()
            self.started[which] = [0.0, todo]
            self.prefilling += self._keeps(which)
            self.owed += self._owes(which)
            if todo <= 0:  # computed elsewhere
                self._start(which)
                continue
            new = min(todo, budget) if rules.chunks else todo
            batch.append((which, new))
            budget -= new
        return batch

    def _todo(self, which: int) -> float:
        """Tokens to compute before the next one: the prompt, and after a preemption what had been made."""
        request = self.requests[which]
        return request.prompt - request.cached + self.made.get(which, 0.0) * request.samples

    def _keeps(self, which: int) -> float:
        """Tokens that the cache keeps of a request before its next one, the unused slots of last blocks included.

        Samples share the whole blocks of the prompt and copy its last one.
        """
        request, block = self.requests[which], self.block
        partial = request.prompt % block if request.samples > 1 else 0
        own = self.made.get(which, 0.0) + partial + (block - 1) / 2
        return request.prompt - request.shared - partial + own * request.samples

    def _fits(self, which: int) -> bool:
        grows = self.sequences * self.a_step + self.requests[which].samples
        needed = self.held + self.prefilling + self._keeps(which) + grows
        return needed + self.rules.reserves * (self.owed + self._owes(which)) <= self.cache

    def _owes(self, which: int) -> float:
        """Tokens that the request has still to make."""
        request = self.requests[which]
        return (request.output - self.made.get(which, 0.0)) * request.samples

    def _prefill(self, batch: list[tuple[int, float]]) -> None:
        """One step with prompts; the sequences that decode go along where the engine mixes, and wait where not."""
        count = len(batch)
        new = sum(tokens for _, tokens in batch) / count
        before = sum(self.started[which][0] + self.requests[which].cached for which, _ in batch) / count
        decoding = self.sequences if self.rules.mixes else 0
        seconds = self.times.mixed(decoding, self.context / max(self.sequences, 1), count, new, before)
        self._pass(seconds, 1, decoding, count)
        if decoding:
            self._advance(1)
        else:
            self.last_look = self.step - self.rules.poll_steps  # after a step of prompts the engine looks again
        for which, tokens in batch:
            state = self.started[which]
            state[0] += tokens
            if state[0] >= state[1]:
                self._start(which)
        self._end()

    def _start(self, which: int) -> None:
        """The prompt is computed: its first token (after a preemption the next) is out, and it decodes from now on."""
        del self.started[which]
        request, outcome = self.requests[which], self.trace.outcomes[which]
        keeps = self._keeps(which)
        self.prefilling -= keeps
        if outcome.first < 0:
            outcome.first = self.now + (self.rules.streams - 1) * self._a_step_ahead()
        made = self.made.get(which, 0.0) + 1
        self.made[which] = made
        self.decoding[which] = _Decoding(self.step, made)
        self.sequences += request.samples
        self.context += (request.prompt + made) * request.samples
        self.held += keeps + request.samples
        self.owed -= request.samples
        steps = -int(-(request.output - made) // self.a_step)
        heapq.heappush(self.ends, (self.step + steps, which))

    def _a_step_ahead(self) -> float:
        """Seconds of a decode step of what decodes now: how long the client waits for each step that is sent with others."""
        if self.rules.streams == 1 or not self.sequences:
            return 0.0
        return self.times.mixed(self.sequences, self.context / self.sequences, 0, 0, 0)

    # decoding

    def _room(self) -> int:
        """Decode steps for which the cache has room."""
        growth = max(self.sequences * self.a_step, 1.0)
        return int((self.cache - self.held - self.prefilling) // growth)

    def _decode(self) -> None:
        """Decode steps until something happens: a sequence ends, a request is seen, or the cache is full."""
        steps = max(1, min(self.ends[0][0] - self.step, self._room()))
        if self.arrived:
            look = self.last_look + self.rules.poll_steps - self.step
            steps = max(1, min(steps, max(look, self.arrived[0][1] + self.rules.ahead - 1 - self.passes)))
        if self.held_since >= 0:
            steps = max(1, min(steps, self.held_since + self.rules.gather_steps - self.step))
        one = self.times.mixed(self.sequences, self.context / self.sequences + self.a_step * steps / 2, 0, 0, 0)
        if self.future:
            until = self.trace.outcomes[self.future[0]].ready - self.now
            steps = max(1, min(steps, int(until / one) + 1))
        self._pass(one * steps, steps, self.sequences, 0)
        self._advance(steps)
        self._end()

    def _pass(self, seconds: float, steps: int, decoding: int, prompts: int) -> None:
        self.now += seconds
        self.passes += steps
        self.trace.steps.append((seconds / steps, steps, decoding * self.a_step, prompts))

    def _advance(self, steps: int) -> None:
        self.step += steps
        made = self.sequences * self.a_step * steps
        self.context += made
        self.held += made
        self.owed -= made
        self.trace.most_cached = max(self.trace.most_cached, self.held + self.prefilling)

    def _preempt(self) -> None:
        """The newest request gives its blocks back and is the first to start again, from its prompt and what it had made."""
        which = next(reversed(self.decoding))
        self._leave(which)
        self.trace.outcomes[which].preempted += 1
        self.trace.preemptions += 1
        self.waiting.appendleft(which)
        self.ends = [end for end in self.ends if end[1] != which]
        heapq.heapify(self.ends)

    def _leave(self, which: int) -> None:
        request, state = self.requests[which], self.decoding.pop(which)
        made = state.tokens + (self.step - state.step) * self.a_step
        self.sequences -= request.samples
        self.context -= (request.prompt + made) * request.samples
        self.owed -= (request.output - made) * request.samples
        self.made[which] = made
        self.held -= self._keeps(which)

    def _end(self) -> None:
        """Let go of the requests that have made their last token; what follows in their slots arrives now."""
        while self.ends and self.ends[0][0] <= self.step:
            _, which = heapq.heappop(self.ends)
            self._leave(which)
            self.trace.outcomes[which].last = self.now
            following = self.slots.get(self.requests[which].slot)
            if following:
                self._arrive(following.popleft(), self.now)


def simulate(
    requests: list[Request],
    rules: Scheduling,
    times: Times,
    *,
    cache_tokens: float = 1e15,
    block: int = 16,
    tokens_a_step: float = 1.0,
) -> Trace:
    """Run all requests to their end. `cache_tokens` is what the cache holds, in blocks of `block`; `tokens_a_step` what a sequence
    makes in one decode step (more than one with a draft). InputError where one request alone is larger than the cache."""
    return _Replica(requests, rules, times, cache_tokens, block, tokens_a_step).run()
