"""`plan-serving`: how to lay a model out on GPUs that serve it, ranked, and why other layouts lose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from calc.breakdown import Breakdown, Component
from calc.communication import usual_links
from calc.errors import InputError
from calc.hardware import Gpu
from calc.model.feed_forward import MoE
from calc.model.spec import ModelSpec
from calc.planner.candidates import divisors
from calc.serving import ServingAnswer, ServingPlan, serve
from calc.serving.plan import KVName, WeightName
from calc.step_time.money import price_of
from calc.units import ceil_div

_STAGES: Final = (1, 2, 4, 8, 16)  # pipeline stages of one replica


class ServingSearchPlan(BaseModel):
    """Traffic and targets of a service whose layout is asked for.

    With `gpus` they are shared out between equal replicas; without it the fewest that `users` need are looked for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: int | None = Field(
        None, ge=1, le=100_000, description="number of GPUs; left out: as few as the users and targets ask for"
    )
    users: int | None = Field(
        None, ge=1, le=10_000_000, description="sequences at the same time; left out: as many as the targets allow"
    )
    ttft_s: float | None = Field(None, gt=0, le=1e6, description="longest time to the first token, in seconds")
    tpot_s: float | None = Field(None, gt=0, le=1e6, description="longest time for each further token, in seconds")
    prompt: int = Field(2048, ge=1, le=2**24, description="prompt tokens of a request")
    output: int = Field(512, ge=1, le=2**24, description="tokens that a request generates")
    engine: Literal["vllm", "sglang", "tensorrt-llm"] = Field("vllm", description="whose rules and kernels")
    weights: WeightName = Field("auto", description="format of the weights; auto: the checkpoint's, or 16 bits")
    kv_dtype: KVName = Field("auto", description="format of the cache; auto: 16 bits, or the checkpoint's")
    gpus_per_node: int | None = Field(
        None, ge=1, le=1024, description="GPUs of one NVLink or PCIe domain; left out: the usual number of that GPU"
    )
    price_per_gpu_hour: float | None = Field(
        None, ge=0, le=1e6, description="price of a GPU-hour; left out: a dated public price, where there is one"
    )
    limit: int = Field(10, ge=1, le=1000, description="layouts to show")

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.gpus is None and self.users is None:
            raise InputError("gpus: give it, or users from which it follows", "gpus")
        return self


@dataclass(frozen=True, eq=False)
class ServingLayout:
    """Equal replicas, each with so many sequences at once; times and rates as `serve` has them for one replica."""

    plan: ServingPlan
    replicas: int
    served: ServingAnswer
    price: float | None  # of a GPU-hour

    @property
    def gpus(self) -> int:
        return self.replicas * self.plan.tp * self.plan.pp * self.plan.dp

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all replicas."""
        return self.replicas * (self.served.speed.tokens_per_s or 0.0)

    @property
    def key(self) -> tuple[int, ...]:
        """What tells layouts apart."""
        return self.plan.tp, self.plan.pp, self.plan.dp, self.plan.ep, self.plan.concurrency

    def as_json(self) -> dict[str, Any]:
        """The layout as a row."""
        speed, rate = self.served.speed, self.tokens_per_s
        cost = self.price * self.gpus / 3600 / rate * 1e6 if self.price is not None and rate else None
        return {
            "gpus": self.gpus,
            "replicas": self.replicas,
            **{name: getattr(self.plan, name) for name in ("tp", "pp", "dp", "ep", "concurrency")},
            "ttft_s": speed.ttft_s,
            "tpot_s": speed.tpot_s,
            "tokens_per_s": rate,
            "tokens_per_s_per_gpu": rate / self.gpus,
            "weights_bytes": self.served.weights_bytes,
            "cost_per_million_tokens": cost,
        }


@dataclass(frozen=True, eq=False)
class ServingSearchAnswer:
    """The layouts that fit and meet the targets, best first."""

    spec: ModelSpec
    plan: ServingSearchPlan
    gpu: Gpu
    layouts: tuple[ServingLayout, ...]
    considered: int
    rejected: dict[str, int]

    @cached_property
    def breakdown(self) -> Breakdown:
        """Seconds of one decode step of the best layout; nothing where none does."""
        step = self.layouts[0].served.speed.decode_step if self.layouts else None
        return step() if step else Breakdown(Component("step"), "seconds")

    def as_json(self) -> dict[str, Any]:
        """The answer with the keys of `python -m calc plan-serving`."""
        return {
            "model": self.spec.name,
            "gpu": self.gpu.name,
            "layouts": [one.as_json() for one in self.layouts[: self.plan.limit]],
            "considered": self.considered,
            "fitting": len(self.layouts),
            "rejected": self.rejected,
            "components": self.breakdown.components(),
            "notes": list(self._notes()),
        }

    def _notes(self) -> Iterator[str]:
        if not self.layouts:
            yield "no layout does: more GPUs, more memory, narrower weights or looser targets would help"
            return
        best = self.layouts[0]
        yield from best.served.speed.notes
        if self.plan.gpus and best.gpus < self.plan.gpus:
            yield f"{self.plan.gpus - best.gpus} of the {self.plan.gpus} GPUs are left over"


def search_serving(spec: ModelSpec, plan: ServingSearchPlan, gpu: Gpu | None = None) -> ServingSearchAnswer:
    """Layouts of a service on GPUs of one kind: tp, pp, data-parallel attention and expert parallelism of a replica, how many replicas, and
    the most sequences at once that meet the targets.

    Ranked by the fewest GPUs where their number is open, else by output tokens a second. InputError without a GPU.
    """
    spec.must_read_text()
    if gpu is None:
        raise InputError("gpu: none is given; plan-serving needs one, such as --gpu h100-sxm-80gb", "gpu")
    if gpu.memory_bytes is None:
        raise InputError.of("gpu", gpu.name, "its memory is unknown; --gpu-memory-gib gives it")
    price = price_of(gpu, plan.price_per_gpu_hour).dollars
    rejected: dict[str, int] = {}
    layouts, considered = [], 0
    for replica in _replicas(spec, plan, gpu):
        considered += 1
        found = _most_sequences(spec, replica, plan, gpu)
        if isinstance(found, str):
            rejected[found] = rejected.get(found, 0) + 1
        else:
            layouts.append(ServingLayout(found.plan, _count(plan, found.plan), found, price))
    by_gpus = plan.gpus is None
    layouts.sort(key=lambda one: (one.gpus if by_gpus else 0, -one.tokens_per_s, one.key))
    return ServingSearchAnswer(spec, plan, gpu, tuple(layouts), considered, rejected)


def _replicas(spec: ModelSpec, plan: ServingSearchPlan, gpu: Gpu) -> Iterator[ServingPlan]:
    """Every layout of one replica that the GPUs hold: tp within a domain, stages across, experts whole or over all ranks."""
    domain = plan.gpus_per_node or usual_links(gpu)[0]
    most = plan.gpus or 64 * domain
    experts = any(isinstance(kind.feed_forward, MoE) for kind in spec.layers.kinds)
    for tp in (d for d in divisors(domain, min(domain, most)) if d & (d - 1) == 0):
        for pp in (stages for stages in _STAGES if stages * tp <= most and stages <= spec.num_hidden_layers):
            attention = [2**k for k in range(10) if 2**k * tp * pp <= most] if experts and pp == 1 else [1]
            for dp in attention:
                for ep in {1, tp * dp} if experts else {1}:
                    if dp > 1 and ep == 1:
                        continue  # attention ranks share the experts
                    yield ServingPlan(
                        engine=plan.engine,
                        tp=tp,
                        pp=pp,
                        dp=dp,
                        ep=ep,
                        weights=plan.weights,
                        kv_dtype=plan.kv_dtype,
                        prompt=plan.prompt,
                        output=plan.output,
                        context=plan.prompt + plan.output,
                    )


def _count(plan: ServingSearchPlan, replica: ServingPlan) -> int:
    """How many replicas: as many as the GPUs hold, or as the users need."""
    if plan.gpus is not None:
        return plan.gpus // (replica.tp * replica.pp * replica.dp)
    return ceil_div(plan.users or 1, replica.concurrency)


def _most_sequences(spec: ModelSpec, replica: ServingPlan, plan: ServingSearchPlan, gpu: Gpu) -> ServingAnswer | str:
    """One replica with the number of sequences that makes the most tokens within the targets, or why none does."""
    try:
        one = serve(spec, replica, gpu)
    except ValueError as error:
        return str(error).splitlines()[0][:200] if isinstance(error, InputError) else "breaks a rule of serve"
    room = int(one.capacity.concurrency or 0) if one.capacity.fits else 0
    if not room:
        return "memory exceeded"
    share = ceil_div(plan.users, _count(plan, replica)) if plan.users and plan.gpus else None
    if share is not None and share > room:
        return "too few sequences fit for the users"
    counts = (share,) if share is not None else tuple(sorted({*(2**k for k in range(room.bit_length())), room}))
    best: ServingAnswer | None = None
    reason = ""
    for count in counts:
        answer = one if count == 1 else serve(spec, replica.model_copy(update={"concurrency": count}), gpu)
        late = _missed(answer, plan)
        reason = reason or late
        if not late and (best is None or _rate(answer) > _rate(best)):
            best = answer
    return best or reason


def _rate(answer: ServingAnswer) -> float:
    return answer.speed.tokens_per_s or 0.0


def _missed(answer: ServingAnswer, plan: ServingSearchPlan) -> str:
    """Which target an answer misses; "" where it meets both."""
    speed = answer.speed
    if speed.tokens_per_s is None or speed.ttft_s is None or speed.tpot_s is None:
        return "its times are unknown"
    if plan.ttft_s is not None and speed.ttft_s > plan.ttft_s:
        return "misses the time to the first token"
    if plan.tpot_s is not None and speed.tpot_s > plan.tpot_s:
        return "misses the time for each further token"
    return ""
