"""The bytes of one pipeline stage over the step: those of its shape, and of the micro-batches in flight on its rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from calc.model.spec import ModelSpec
from calc.pipeline import weight_versions
from calc.training.autograd.segments import Constant, Segment
from calc.training.caching_allocator import CachingAllocator
from calc.training.deepspeed.live_parameters import LiveParameters
from calc.training.deepspeed.stage import live_parameters
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.programs import program_of
from calc.training.reserved_memory import replayed
from calc.training.stage_shape import Moment, StageShape
from calc.training.states.fsdp_buffers import FsdpBuffers, fsdp_buffers
from calc.training.states.optimizer_step import StepBytes
from calc.training.states.sharding import Placed, StateKey
from calc.training.states.stage_tensors import groups_of, model_of
from calc.units import ceil_div

_MOST_REPLAYS: Final = 4096
_REPLAYS: dict[
    tuple[ModelSpec, TrainingPlan, int | None], int
] = {}  # a replay takes 10 to 100 ms: a page that moves asks again


class Stop(NamedTuple):
    """A point of the step: its phase, the index of the segment that runs (-1: none), the bytes of each part by name."""

    phase: str
    segment: int
    parts: dict[str, int]


@dataclass(frozen=True, eq=False)
class StageMemory:
    """One device of one stage. All figures are bytes of one device. What does not hang on the rank is the shape's."""

    shape: StageShape
    stage: Stage

    @property
    def plan(self) -> TrainingPlan:
        return self.shape.plan

    @property
    def spec(self) -> ModelSpec:
        return self.shape.spec

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.shape.segments

    @property
    def constants(self) -> tuple[Constant, ...]:
        return self.shape.constants

    @property
    def groups(self) -> tuple[Placed, ...]:
        return self.shape.groups

    @property
    def key(self) -> StateKey:
        return self.shape.key

    @property
    def full_weights(self) -> FsdpBuffers | LiveParameters:
        return self.shape.full_weights

    @property
    def ddp_buckets(self) -> int:
        return self.shape.ddp_buckets

    @property
    def step(self) -> StepBytes:
        return self.shape.step

    @property
    def step_bytes(self) -> int:
        return self.shape.step_bytes

    @property
    def constant_activations(self) -> int:
        return self.shape.constant_activations

    @property
    def states(self) -> tuple[int, int, int]:
        """Parameters (with PipeDream's earlier versions), gradients and optimizer state between uses."""
        parameters, gradients, optimizer = self.shape.states
        return parameters + self.older_weights, gradients, optimizer

    @cached_property
    def older_weights(self) -> int:
        """PipeDream's earlier versions of the weights."""
        if self.plan.pp == 1:
            return 0
        versions = weight_versions(self.plan.schedule, self.plan.pp)[self.stage.rank]
        return (versions - 1) * self.shape.states[0]

    @cached_property
    def waiting(self) -> int:
        """What the other micro-batches in flight keep."""
        kept = self.shape.kept_waiting
        return ceil_div(kept * self.stage.chunks, self.stage.virtual) - kept

    @property
    def activations(self) -> int:
        """Everything besides the states at the end of forward, once only the loss is kept."""
        return self.shape.activations + self.waiting

    def live_parts(self, phase: str, moment: Moment) -> Iterator[tuple[str, int]]:
        """What is alive at a moment of the step, part by part, with its bytes."""
        yield from self.shape.live_parts(phase, moment.segment, moment.at)
        yield "older_weights", self.older_weights
        yield "in_flight", self._in_flight(phase)

    def _in_flight(self, phase: str) -> int:
        return self.waiting if phase in ("forward", "backward") else 0

    @cached_property
    def moments(self) -> dict[str, Moment]:
        """The highest point of each phase."""
        return {
            phase: moment.raised(self.older_weights + self._in_flight(phase))
            for phase, moment in self.shape.moments.items()
        }

    @cached_property
    def peak(self) -> tuple[str, Moment]:
        """The phase with the highest point."""
        return max(self.moments.items(), key=lambda item: item[1].bytes)

    def timeline(self) -> Iterator[Stop]:
        """The highest point of each segment, forward and back, between the passes before and the optimizer's step, in order."""
        for found in self.shape.passes:
            yield Stop(found.path[0], -1, dict(self.live_parts(found.path[0], Moment(0, -1))))
        indices = range(len(self.segments))
        for phase, order in (("forward", indices), ("backward", reversed(indices))):
            ats = ["block", *(["before", "after"] if self.full_weights.active else [])]
            for index in order:
                moments = (
                    dict(self.live_parts(phase, Moment(0, index, at)))
                    for at in ats
                    if (phase, at) != ("forward", "after")
                )
                yield Stop(phase, index, max(moments, key=lambda parts: sum(parts.values())))
        yield Stop("step", -1, dict(self.live_parts("step", Moment(0, -1))))

    @property
    def replayed(self) -> int | None:
        """What the allocator reserves beyond the peak on a device that has enough; as `replayed_within` has it."""
        return self.replayed_within(None)

    def replayed_within(self, limit: int | None) -> int | None:
        """What the allocator reserves beyond the peak, by playing the step through a model of it; None where the step's allocations
        are not known in order: Megatron's ledgers, pipelines, and steps with passes of their own. `limit`: the bytes that the allocator
        may take of the device, near which it gives back what it caches.
        """
        if not self.plan.replays:
            return None
        asked = self.spec, self.plan, limit
        if asked not in _REPLAYS:
            if len(_REPLAYS) >= _MOST_REPLAYS:
                _REPLAYS.clear()
            peak = self.peak[1].bytes
            free = self.replayed_within(None) if limit is not None else None
            if free is not None and limit is not None and peak + free <= limit:
                return free
            allocator = CachingAllocator(expandable=self.plan.expandable, limit=limit)
            found = max(0, replayed(self, allocator) - peak)
            _REPLAYS[asked] = found if free is None else min(found, free)
        return _REPLAYS[asked]

    @cached_property
    def idle_pools(self) -> int:
        """What the pools of the allocator hold beyond the peak, where FSDP2's streams have their own: no freed block is lent to
        another stream, so that each pool grows to its own highest point. Gathers fill their buffers in one stream; the shards
        of gradients are allocated in that of the reduce-scatters.
        """
        if not self.full_weights.active or not self.key.rows:
            return 0
        computing = self.shape.own_bytes + self.older_weights + self.waiting
        own = max(computing, self.moments["step"].bytes - self.states[1])
        return own + self.states[1] + self.full_weights.pool - self.peak[1].bytes


def stage_memories(plan: TrainingPlan, spec: ModelSpec, stages: Iterable[Stage]) -> tuple[StageMemory, ...]:
    """The memory of the stages under the plan's implementation; stages of equal layers share their shape."""
    shapes: dict[Stage, StageShape] = {}
    made = []
    for stage in stages:
        kind = stage._replace(rank=0, chunks=1)
        if kind not in shapes:
            shapes[kind] = _shape(plan, spec, kind)
        made.append(StageMemory(shapes[kind], stage))
    return tuple(made)


def _shape(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> StageShape:
    groups = groups_of(plan, spec, stage)
    parts = program_of(plan).parts(plan, spec, stage, groups)
    whole: FsdpBuffers | LiveParameters = fsdp_buffers(plan, spec, stage, model_of(plan, spec))
    if plan.implementation == "deepspeed":
        whole = live_parameters(plan, parts.segments)
    return StageShape(
        plan,
        spec,
        stage,
        parts.segments,
        parts.constants,
        groups + parts.reference,
        StateKey.of(plan),
        whole,
        parts.passes,
    )
