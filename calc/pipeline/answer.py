"""What a simulated pipeline says: how busy it is, what it holds, where the time goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from calc.breakdown import Breakdown
from calc.pipeline.closed_forms import ClosedForm, closed_forms
from calc.pipeline.parts import parts
from calc.pipeline.plan import PipelinePlan
from calc.pipeline.schedules import weight_versions
from calc.pipeline.simulation import RankRun, run


class Event(NamedTuple):
    """One operation in time: rank `stage`, kind F, B, I or W, its micro-batch and chunk, start and end in seconds."""

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start: float
    end: float


_NUMBERS = ("utilization", "bubble_fraction", "makespan", "makespan_bubble", "span_bubble", "bubble_over_ideal")


@dataclass(frozen=True, slots=True)
class PipelineAnswer:
    """One step of a pipeline.

    `utilization` (work over stages x makespan) and `bubble_fraction` (the rest) lie in [0, 1]. Seconds: `makespan`, from
    the first operation to the end of the last; `makespan_bubble`, what the busiest rank idles of it; `span_bubble`, the
    most that any rank idles between its own first and last operation. `bubble_over_ideal` is makespan_bubble over the
    busiest rank's work. `in_flight` counts the (micro-batch, chunk) pairs each rank holds at its peak, `weight_versions`
    the copies of each rank's weights.
    """

    plan: PipelinePlan
    ranks: tuple[RankRun, ...]
    utilization: float
    bubble_fraction: float
    makespan: float
    makespan_bubble: float
    span_bubble: float
    bubble_over_ideal: float
    in_flight: tuple[int, ...]
    weight_versions: tuple[int, ...]

    @property
    def timeline(self) -> tuple[Event, ...]:
        """Every operation, rank by rank and in time; built anew at each call."""
        return tuple(
            Event(stage, kind, microbatch, chunk, start, end)
            for stage, rank in enumerate(self.ranks)
            for (kind, chunk, microbatch), start, end in zip(rank.ops, rank.starts, rank.ends, strict=True)
        )

    @property
    def closed_forms(self) -> tuple[ClosedForm, ...]:
        """What the literature gives in closed form for this plan."""
        return closed_forms(self.plan)

    @property
    def breakdown(self) -> Breakdown:
        """Where each rank's seconds go: work by kind, and waiting. Sums to stages x makespan."""
        return parts(self.plan, self.ranks, self.makespan)

    def simulated(self, quantity: str) -> float:
        """The simulated value of a closed form's quantity; of one that has a value per rank, rank 0's."""
        value: float | tuple[int, ...] = getattr(self, quantity)
        return value[0] if isinstance(value, tuple) else value

    def as_json(self) -> dict[str, Any]:
        """The answer with the keys of the command line."""
        return {
            "schedule": self.plan.schedule,
            "stages": self.plan.stages,
            "microbatches": self.plan.microbatches,
            "virtual_stages": self.plan.chunks,
            **{name: getattr(self, name) for name in _NUMBERS},
            "in_flight": list(self.in_flight),
            "weight_versions": list(self.weight_versions),
            "timeline": [event._asdict() for event in self.timeline],
            "closed_forms": [form.as_json(self.simulated(form.quantity)) for form in self.closed_forms],
            "components": self.breakdown.components(),
        }


def simulate(plan: PipelinePlan) -> PipelineAnswer:
    """Run the plan's schedule operation by operation (see `calc.pipeline.simulation.run`) and sum up."""
    ranks = run(plan)
    makespan = max(rank.last for rank in ranks)
    busiest = max(rank.busy for rank in ranks)
    bubble = max(0.0, makespan - busiest)
    utilization = min(1.0, sum(rank.busy for rank in ranks) / (plan.stages * makespan))
    return PipelineAnswer(
        plan=plan,
        ranks=ranks,
        utilization=utilization,
        bubble_fraction=1 - utilization,
        makespan=makespan,
        makespan_bubble=bubble,
        span_bubble=max(rank.waiting for rank in ranks),
        bubble_over_ideal=bubble / busiest,
        in_flight=tuple(rank.peak() for rank in ranks),
        weight_versions=weight_versions(plan.schedule, plan.stages),
    )
