"""The bytes of one pipeline stage over the step: its states, what it keeps, and the highest point of each phase."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from calc.model.spec import ModelSpec
from calc.pipeline import weight_versions
from calc.training.autograd.segments import Constant, Segment
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.programs import program_of
from calc.training.states.fsdp_buffers import Gathered, gathered
from calc.training.states.offload import resident
from calc.training.states.optimizer_step import StepBytes, group_step
from calc.training.states.recipes import RECIPES
from calc.training.states.sharding import GROUPS, Placed, StateKey, group_bytes
from calc.training.states.stage_tensors import groups_of, model_of
from calc.units import ceil_div

EMBEDDING, END = ("embedding",), ("end",)
_PASSING = ("backward", "stack", "end")  # constants that are gone between forward and backward


class Moment(NamedTuple):
    """The highest point of a phase: bytes, and the segment whose peak it is (-1: none).

    `at`: its "block" runs; or, where weights are gathered, "before" it, or "after" it, when its gradients are reduced.
    `own`: those of its bytes that lie in the pool of the stream that computes.
    """

    bytes: int
    segment: int
    at: str = "block"
    own: int = 0


@dataclass(frozen=True, eq=False)
class StageMemory:
    """One device of one stage. All figures are bytes of one device."""

    plan: TrainingPlan
    spec: ModelSpec
    stage: Stage
    segments: tuple[Segment, ...]
    constants: tuple[Constant, ...]
    groups: tuple[Placed, ...]
    key: StateKey
    gathered: Gathered
    passes: tuple[Segment, ...] = ()  # phases of their own, before the policy's forward

    @cached_property
    def states(self) -> tuple[int, int, int]:
        """Parameters, gradients and optimizer state held between uses."""
        held = [(group_bytes(tensors, self.key), count) for tensors, count in self.groups]
        sums = [sum(count * found.rounded[at] for found, count in held) for at in range(3)]
        here = resident(self.plan)
        parameters, gradients, optimizer = (
            size if name in here else 0 for name, size in zip(GROUPS, sums, strict=True)
        )
        return parameters + self.older_weights, gradients, optimizer

    @cached_property
    def older_weights(self) -> int:
        """PipeDream's earlier versions of the weights."""
        if self.plan.pp == 1:
            return 0
        versions = weight_versions(self.plan.schedule, self.plan.pp)[self.stage.rank]
        return (versions - 1) * sum(count * group_bytes(tensors, self.key).parameters for tensors, count in self.groups)

    @property
    def kept_by_segments(self) -> int:
        return sum(segment.bytes.kept for segment in self.segments)

    @property
    def constant_bytes(self) -> int:
        return int(sum(constant.leaf.total for constant in self.constants if constant.until not in _PASSING))

    @cached_property
    def kept_once(self) -> int:
        """What one micro-batch keeps from forward to backward on this device."""
        each = sum(
            constant.leaf.total for constant in self.constants if constant.each and constant.until not in _PASSING
        )
        return self.kept_by_segments + int(each) + self.received

    @cached_property
    def received(self) -> int:
        """The input that came from the stage before, which backward needs again, unless the first layer keeps it itself."""
        if self.stage.first or not self.segments or self.segments[0].keeps_input:
            return 0
        return self.segments[0].bytes.input

    @cached_property
    def waiting(self) -> int:
        """What the other micro-batches in flight keep."""
        return ceil_div(self.kept_once * self.stage.chunks, self.stage.virtual) - self.kept_once

    @cached_property
    def beside(self) -> int:
        """What is alive beside the states and the blocks all through forward and backward."""
        return self.constant_bytes + self.received + self.waiting + self.ddp_buckets

    @cached_property
    def ddp_buckets(self) -> int:
        """DistributedDataParallel's flat buckets, made when it wraps the model: a second copy of every gradient.

        ZeRO-1 (ZeroRedundancyOptimizer) has them too; where main gradients exist (Megatron), they are the buckets.
        """
        main = any(state.name == "main_gradient" for state in RECIPES[self.plan.recipe].states)
        alone = self.plan.dp * self.plan.cp == 1
        return 0 if alone or main or self.plan.zero > 1 or not self.plan.transformers else self.states[1]

    @cached_property
    def activations(self) -> int:
        """Everything beside the states at the end of forward, once only the loss is kept."""
        return self.beside + self.kept_by_segments + self.gathered.kept_bytes

    @cached_property
    def constant_activations(self) -> int:
        """The part of the activations that does not grow with the batch: tables, weight copies, buffers, gathered weights."""
        constants = [constant for constant in self.constants if constant.until not in _PASSING]
        fixed = sum(constant.leaf.total for constant in constants if not constant.each or constant.fixed)
        return (
            int(fixed)
            + self.ddp_buckets
            + sum(segment.bytes.fixed for segment in self.segments)
            + self.gathered.kept_bytes
        )

    @cached_property
    def accumulates(self) -> bool:
        """Whether gradients are there before the backward begins: main gradients are, and those of earlier micro-batches."""
        main = any(state.name == "main_gradient" for state in RECIPES[self.plan.recipe].states)
        return (main or self.plan.microbatches > 1) and not self.streams

    @property
    def streams(self) -> bool:
        """Whether gradients leave for the host while backward runs."""
        return self.plan.offload != "none"

    @property
    def adds_at_once(self) -> bool:
        """Whether each new gradient is added to one that is there, and freed; sharded gradients wait for their layer."""
        return self.accumulates and (self.plan.zero < 2 or self.plan.shards == 1)

    @cached_property
    def later_gradients(self) -> tuple[int, ...]:
        """For each segment, the gradients that the segments after it have left when its backward begins."""
        if self.accumulates:
            return (0,) * len(self.segments)
        made, total = [], 0
        for segment in reversed(self.segments):
            made.append(total)
            if self.streams:
                total = 0  # but for the segment just before, all have left
            if self.waits_gathered(segment):
                continue
            total += group_bytes(segment.tensors, self.key).gradients
            if segment.path == END and self.spec.tied:
                total += group_bytes(model_of(self.plan, self.spec).tied_head, self.key).gradients
        return tuple(reversed(made))

    def waits_gathered(self, segment: Segment) -> bool:
        """Whether its gradients wait unsharded, or leave, among what is gathered."""
        return self.gathered.active and (self.streams or (self.gathered.waits and not segment.inside))

    @property
    def moments(self) -> dict[str, Moment]:
        """The highest point of each phase."""
        return self._timeline[0]

    @cached_property
    def _timeline(self) -> tuple[dict[str, Moment], int]:
        """The highest point of each phase, and of the pool of the stream that computes."""
        parameters, gradients, optimizer = self.states
        base = parameters + optimizer + self.beside + (gradients if self.accumulates else 0)
        forward = backward = Moment(base, -1)
        before = []
        kept = cached = own = 0
        late = int(sum(constant.leaf.total for constant in self.constants if constant.late))
        stack, layers, only = (self._bytes_until(until) for until in ("stack", "layers", "backward"))
        for index, segment in enumerate(self.segments):
            before.append(kept)
            if not self._between_equals(index):
                taken = late + (self.received if index == 0 else 0)
                taken -= stack if segment.inside else 0
                found = self._moments("forward", index, base - taken + kept + cached, segment.bytes.forward_peak)
                forward, own = max(forward, *found), max(own, *(moment.own for moment in found))
            kept += segment.bytes.kept
            cached += segment.bytes.cached
        for index, segment in reversed(list(enumerate(self.segments))):
            if self._between_equals(index):
                continue
            peak = segment.bytes.accumulating_peak if self.adds_at_once else segment.bytes.backward_peak
            freed = (layers if segment.path == EMBEDDING else 0) - only
            beside = base - freed + before[index] + self.later_gradients[index]
            found = self._moments("backward", index, beside, peak)
            backward, own = max(backward, *found), max(own, *(moment.own for moment in found))
        step = (
            parameters
            + gradients
            + optimizer
            + self._bytes_until("step")
            + self._bytes_until("end")
            + self.step_bytes
            + self.ddp_buckets
        )
        before_forward = parameters + optimizer + self._bytes_until("step") + self.ddp_buckets
        first = {found.path[0]: Moment(before_forward + found.bytes.forward_peak, -1) for found in self.passes}
        return {**first, "forward": forward, "backward": backward, "step": Moment(step, -1)}, max(own, step - gradients)

    def _between_equals(self, index: int) -> bool:
        """Whether the segments on both sides are the same: what lies beside changes evenly along them, so that one is as high.
        Where weights are gathered, the neighbours matter too."""
        if self.gathered.active or not 0 < index < len(self.segments) - 1:
            return False
        return self.segments[index - 1] is self.segments[index] is self.segments[index + 1]

    def _moments(self, phase: str, index: int, beside: int, peak: int) -> list[Moment]:
        """A segment's own highest point, and those before and after it where weights are gathered and gradients reduced."""
        gathered = self.gathered
        shards = self.states[1] if self.accumulates else self.later_gradients[index] if phase == "backward" else 0
        whole, buffers = gathered.sizes(phase, index)
        found = [Moment(beside + peak + whole, index, "block", beside + peak + whole - buffers - shards)]
        for at in ("before", "after") if gathered.active else ():
            if at == "before" or phase == "backward":
                held = sum(self.around(phase, index, at).values())
                whole, buffers = gathered.sizes(phase, index, at)
                found.append(Moment(beside + held + whole, index, at, beside + held + whole - buffers - shards))
        return found

    def around(self, phase: str, index: int, at: str) -> dict[str, int]:
        """What a segment holds before it runs and after, beside what is gathered."""
        sizes = self.segments[index].bytes
        if phase == "forward":
            return {"input": sizes.input}
        if at == "before":
            return {"kept": sizes.kept, "output_gradient": sizes.output_gradient}
        root = (
            self.gathered.waits and self.segments[index].path == EMBEDDING
        )  # whose gradients are among those of the root
        return {"input_gradient": sizes.input_gradient, "weight_gradients": 0 if root else sizes.weight_gradients}

    def _bytes_until(self, until: str) -> int:
        return int(sum(constant.leaf.total for constant in self.constants if constant.until == until))

    @cached_property
    def step(self) -> StepBytes:
        """What the optimizer's step makes and frees, by its kernel: the other kernels' are 0."""
        held = [(group_step(tensors, self.key), count) for tensors, count in self.groups if count and not self.streams]
        kernel = self.plan.optimizer_kernel
        return StepBytes(
            sum(found.foreach * count for found, count in held) if kernel == "foreach" else 0,
            max((found.loop for found, _ in held), default=0) if kernel == "loop" else 0,
            max((found.matrix for found, _ in held), default=0),
        )

    @property
    def step_bytes(self) -> int:
        """The most of it at a time: Muon's matrices and AdamW's other tensors come one after the other."""
        return max(self.step)

    @cached_property
    def peak(self) -> tuple[str, Moment]:
        """The phase with the highest point."""
        return max(self.moments.items(), key=lambda item: item[1].bytes)

    @cached_property
    def idle_pools(self) -> int:
        """What the pools of the allocator hold beyond the peak, where FSDP2's streams have their own: no freed block is lent to
        another stream, so that each pool grows to its own highest point. Gathers fill their buffers in one stream; the shards
        of gradients are allocated in that of the reduce-scatters.
        """
        if not self.gathered.active or not StateKey.of(self.plan).rows:
            return 0
        return self._timeline[1] + self.states[1] + self.gathered.pool - self.peak[1].bytes


def stage_memory(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> StageMemory:
    """The memory of one stage under the plan's implementation."""
    groups = groups_of(plan, spec, stage)
    parts = program_of(plan).parts(plan, spec, stage, groups)
    return StageMemory(
        plan,
        spec,
        stage,
        parts.segments,
        parts.constants,
        groups + parts.reference,
        StateKey.of(plan),
        gathered(plan, spec, stage, model_of(plan, spec)),
        parts.passes,
    )
