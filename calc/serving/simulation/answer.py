"""The `simulate` answer: what a stream of requests sees of a replica or of a fleet, and what the fleet costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from calc.breakdown import Breakdown, Component
from calc.errors import InputError
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.answer import ServingAnswer, serve
from calc.serving.simulation.plan import SimulationPlan
from calc.serving.simulation.replica import Outcome, Request, Trace, simulate
from calc.serving.simulation.statistics import Latencies, Waste, latencies, waste
from calc.serving.simulation.workload import requests_of
from calc.serving.speed.estimate import rules_of, step_times
from calc.serving.speed.scheduling import Scheduling
from calc.serving.speed.step import StepTimes
from calc.units import GB

_MOST_REPLICAS = 4096


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fewest replicas that take the traffic within the targets, their GPUs and price; `why_not` where no number does."""

    replicas: int | None
    gpus: int | None
    cost_per_hour: float | None
    ttft_p95_s: float | None
    tpot_p95_s: float | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class SimulationAnswer:
    """What the requests saw. The breakdown's leaves, the seconds of the busiest replica by what it did, sum to `seconds`."""

    serving: ServingAnswer
    plan: SimulationPlan
    requests: int
    output_tokens: int
    seconds: float
    latencies: Latencies
    waste: Waste
    preemptions: int
    cache_tokens: float | None
    most_cached: float
    gpus: int
    cost_per_million_tokens: float | None
    breakdown: Breakdown
    fleet: Fleet | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The answer with the keys of `python -m calc simulate`."""
        return {
            "model": self.serving.spec.name,
            "gpu": self.serving.gpu.name if self.serving.gpu else None,
            "engine": self.plan.engine,
            "times": self.serving.speed.source,
            "requests": self.requests,
            "seconds": self.seconds,
            "requests_per_s": self.requests / self.seconds if self.seconds else None,
            "tokens_per_s": self.output_tokens / self.seconds if self.seconds else None,
            "ttft_s": asdict(self.latencies.ttft),
            "tpot_s": asdict(self.latencies.tpot),
            "itl_s": asdict(self.latencies.itl),
            "request_s": asdict(self.latencies.whole),
            "preemptions": self.preemptions,
            "kv_tokens": self.cache_tokens,
            "most_kv_tokens": self.most_cached,
            "wasted_share": asdict(self.waste),
            "gpus": self.gpus,
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "fleet": asdict(self.fleet) if self.fleet else None,
            "components": self.breakdown.components(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class _Server:
    """One replica that can run requests: its steps, its rules and its cache."""

    steps: StepTimes
    rules: Scheduling
    cache: float
    block: int
    tokens_a_step: float

    def run(self, requests: list[Request]) -> Trace:
        return simulate(
            requests,
            self.rules,
            self.steps,
            cache_tokens=self.cache,
            block=self.block,
            tokens_a_step=self.tokens_a_step,
        )


def simulate_serving(spec: ModelSpec, plan: SimulationPlan, gpu: Gpu | None = None) -> SimulationAnswer:
    """Run the plan's requests. InputError without a GPU, for a model that generates nothing, and for a request that no cache holds."""
    if gpu is None:
        raise InputError(
            "gpu: none is given; simulate needs one of python -m calc gpus, such as --gpu h100-sxm-80gb", "gpu"
        )
    if not spec.generates:
        raise InputError(f"model: {spec.name} generates nothing, so there is nothing to simulate", "model")
    serving = serve(spec, plan, gpu)
    assert isinstance(serving.plan, SimulationPlan)
    plan = serving.plan  # with the formats that "auto" stands for
    tokens = serving.capacity.tokens
    cache = 1e15 if tokens is None else float(tokens * plan.dp)
    block = serving.capacity.block_size or plan.block_size
    server = _Server(step_times(spec, plan, gpu), rules_of(plan, gpu), cache, block, plan.tokens_a_step)
    requests = requests_of(plan)
    traces, outcomes = _run(server, plan, requests, serving.kv_bytes_per_token)
    seconds = max(trace.seconds for trace in traces)
    output = sum(request.output * request.samples for request in requests)
    gpus = plan.tp * plan.pp * plan.dp * (plan.replicas + plan.prefill_replicas)
    whole = Trace(outcomes, [step for trace in traces for step in trace.steps], seconds)
    price = plan.price_per_gpu_hour
    return SimulationAnswer(
        serving,
        plan,
        len(requests),
        output,
        seconds,
        latencies(requests, whole),
        waste(requests, block, plan.context),
        sum(trace.preemptions for trace in traces),
        None if tokens is None else cache,
        max(trace.most_cached for trace in traces),
        gpus,
        price * gpus * seconds / 3600 / output * 1e6 if price else None,
        _breakdown(max(traces, key=lambda trace: trace.seconds)),
        _fleet(server, plan, serving.kv_bytes_per_token) if plan.traffic else None,
        serving.notes,
    )


def _run(server: _Server, plan: SimulationPlan, requests: list[Request], kv: int) -> tuple[list[Trace], list[Outcome]]:
    """The traces of all replicas, and the outcomes in the order of the requests."""
    if plan.prefill_replicas:
        return _separated(server, plan, requests, kv)
    if plan.arrivals == "closed" and plan.rate is None and requests[-1].arrival is None:
        shares = [
            [at for at, request in enumerate(requests) if request.slot % plan.replicas == n]
            for n in range(plan.replicas)
        ]
    else:
        shares = [list(range(n, len(requests), plan.replicas)) for n in range(plan.replicas)]
    traces = [server.run([requests[at] for at in share]) for share in shares if share]
    outcomes = [Outcome(0.0)] * len(requests)
    for share, trace in zip([share for share in shares if share], traces, strict=True):
        for at, outcome in zip(share, trace.outcomes, strict=True):
            outcomes[at] = outcome
    return traces, outcomes


def _separated(
    server: _Server, plan: SimulationPlan, requests: list[Request], kv: int
) -> tuple[list[Trace], list[Outcome]]:
    """Prompts on replicas of their own, whose first token is out before the cache is sent; the rest decodes elsewhere."""
    alone = replace(server.rules, mixes=False, reserves=0.0)
    prompts = [replace(request, output=1) for request in requests]
    before = _Server(server.steps, alone, server.cache, server.block, 1.0)
    shares = [range(n, len(prompts), plan.prefill_replicas) for n in range(plan.prefill_replicas)]
    first: dict[int, Outcome] = {}
    traces = []
    for share in shares:
        traces.append(before.run([prompts[at] for at in share]))
        first.update(zip(share, traces[-1].outcomes, strict=True))
    sent = kv * plan.tp / (plan.transfer_GBps * GB)  # seconds a token, over one link
    ready = [first[at].first + request.prompt * sent for at, request in enumerate(requests)]
    order = sorted(range(len(requests)), key=ready.__getitem__)
    outcomes = [Outcome(0.0)] * len(requests)
    for n in range(plan.replicas):
        own = order[n :: plan.replicas]
        sent_to = [replace(requests[at], arrival=ready[at], cached=requests[at].prompt, tokenised=True) for at in own]
        traces.append(server.run(sent_to))
        for at, outcome in zip(own, traces[-1].outcomes, strict=True):
            outcomes[at] = replace(first[at], last=max(outcome.last, first[at].first), preempted=outcome.preempted)
    return traces, outcomes


def _breakdown(trace: Trace) -> Breakdown:
    """What a replica's time went into: steps with prompts alone, steps with both, steps that decode, and waiting for requests."""
    prompts = sum(seconds * count for seconds, count, tokens, new in trace.steps if new and not tokens)
    both = sum(seconds * count for seconds, count, tokens, new in trace.steps if new and tokens)
    decode = sum(seconds * count for seconds, count, tokens, new in trace.steps if not new)
    parts = (("prompts", prompts), ("prompts_and_decode", both), ("decode", decode))
    idle = Component("idle", max(0.0, trace.seconds - prompts - both - decode))
    return Breakdown(Component("replica", children=(*(Component(*part) for part in parts), idle)), "seconds")


def _fleet(server: _Server, plan: SimulationPlan, kv: int) -> Fleet:
    """The fewest replicas for the traffic, found by doubling and halving; each takes its share of Poisson arrivals."""
    assert plan.traffic
    traffic = plan.traffic

    def at(replicas: int) -> Latencies:
        one = plan.model_copy(update={"replicas": 1, "prefill_replicas": 0})
        requests = requests_of(one, traffic / replicas)
        return latencies(requests, server.run(requests))

    def good(found: Latencies) -> bool:
        first = plan.target_ttft_s is None or found.ttft.p95 <= plan.target_ttft_s
        return first and (plan.target_tpot_s is None or found.tpot.p95 <= plan.target_tpot_s)

    most = 1
    while not good(found := at(most)):
        if most >= _MOST_REPLICAS:
            text = f"{most:,} replicas do not: a replica with one request at a time has {found.ttft.p95:.3g} s and {found.tpot.p95:.3g} s"
            return Fleet(None, None, None, found.ttft.p95, found.tpot.p95, text)
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        tried = at(middle)
        least, most, found = (least, middle, tried) if good(tried) else (middle, most, found)
    gpus = most * plan.tp * plan.pp * plan.dp
    price = plan.price_per_gpu_hour
    return Fleet(most, gpus, price * gpus if price else None, found.ttft.p95, found.tpot.p95)
