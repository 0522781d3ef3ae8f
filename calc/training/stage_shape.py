"""What stages of equal layers have in common: states, segments, constants, and what is alive at each moment of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from calc.model.spec import ModelSpec
from calc.training.autograd.segments import Constant, Segment
from calc.training.deepspeed.live_parameters import LiveParameters
from calc.training.deepspeed.stage import partition_bytes
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.states.fsdp_buffers import FsdpBuffers
from calc.training.states.offload import resident
from calc.training.states.optimizer_step import StepBytes, group_step, one_weight_step
from calc.training.states.recipes import RECIPES
from calc.training.states.sharding import GROUPS, Placed, StateKey, group_bytes
from calc.training.states.stage_tensors import model_of

EMBEDDING, END = ("embedding",), ("end",)


class Moment(NamedTuple):
    """The highest point of a phase: bytes, and the segment whose peak it is (-1: none).

    `at`: its "block" runs; or, where weights are gathered, "before" it, or "after" it, when its gradients are reduced.
    `own`: those of its bytes that lie in the pool of the stream that computes.
    """

    bytes: int
    segment: int
    at: str = "block"
    own: int = 0

    def raised(self, more: int) -> Moment:
        """The same moment with more bytes alive."""
        return self._replace(bytes=self.bytes + more, own=self.own + more)


class Run(NamedTuple):
    """Equal segments in a row, from index `start` to before `stop`; `kept` and `cached` by the segments before the run.

    `gradients`: those that one segment leaves. `later`: those that the segments after the run have left when the backward of its
    last one begins.
    """

    segment: Segment
    start: int
    stop: int
    kept: int
    cached: int
    gradients: int
    later: int

    def highest(self, *, neighbours: bool) -> list[int]:
        """The segments among which the highest is: what is alive besides a segment changes evenly along its likes. With
        `neighbours`, those next to other segments stand apart."""
        ends = {self.start, self.stop - 1}
        inner = {self.start + 1, self.stop - 2} & set(range(self.start, self.stop))
        return sorted(ends | inner if neighbours else ends)


@dataclass(frozen=True, eq=False)
class StageShape:
    """One device of every stage with these layers, with one micro-batch in flight. All figures are bytes of one device."""

    plan: TrainingPlan
    spec: ModelSpec
    stage: Stage
    segments: tuple[Segment, ...]
    constants: tuple[Constant, ...]
    groups: tuple[Placed, ...]
    key: StateKey
    full_weights: FsdpBuffers | LiveParameters
    passes: tuple[Segment, ...] = ()  # phases of their own, before the policy's forward

    @cached_property
    def states(self) -> tuple[int, int, int]:
        """Parameters, gradients and optimizer state between uses."""
        found = [(group_bytes(tensors, self.key).rounded, count) for tensors, count in self.groups]
        here = resident(self.plan)
        sizes = (sum(count * sizes[at] for sizes, count in found) for at in range(3))
        parameters, gradients, optimizer = (
            size if name in here else 0 for name, size in zip(GROUPS, sizes, strict=True)
        )
        return parameters, 0 if self.plan.optimizer_in_backward else gradients, optimizer

    def kept_of(self, segment: Segment) -> int:
        """What a segment keeps on the device for its backward: a layer whose input waits in host memory, nothing."""
        return 0 if self.plan.offload_activations and segment.inside else segment.bytes.kept

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The segments in order, equal neighbours as one run."""
        spans: list[tuple[Segment, int, int]] = []
        for _, equal in groupby(enumerate(self.segments), key=lambda item: id(item[1])):
            (start, segment), *rest = equal
            spans.append((segment, start, start + 1 + len(rest)))
        made, later = [], 0
        for segment, start, stop in reversed(spans):
            gradients = self._gradients_left(segment)
            made.append((segment, start, stop, gradients, later))
            later = gradients if self.streams else later + (stop - start) * gradients
        runs, kept, cached = [], 0, 0
        for segment, start, stop, gradients, after in reversed(made):
            runs.append(Run(segment, start, stop, kept, cached, gradients, after))
            kept += (stop - start) * self.kept_of(segment)
            cached += (stop - start) * segment.bytes.cached
        return tuple(runs)

    def _gradients_left(self, segment: Segment) -> int:
        """The gradients that a segment's backward leaves for those of the segments before it."""
        held = self.accumulates or self.full_weights.holds_gradients
        if held or self.bucketed or self.plan.optimizer_in_backward or self.waits_gathered(segment):
            return 0
        tied = segment.path == END and self.spec.tied
        head = group_bytes(model_of(self.plan, self.spec).tied_head, self.key).gradients if tied else 0
        return group_bytes(segment.tensors, self.key).gradients + head

    def run_of(self, index: int) -> Run:
        """The run of the segment of that index."""
        return next(run for run in self.runs if index < run.stop)

    @cached_property
    def kept_by_segments(self) -> int:
        return sum((run.stop - run.start) * self.kept_of(run.segment) for run in self.runs)

    @cached_property
    def kept_constants(self) -> tuple[Constant, ...]:
        """The constants that live from forward to backward."""
        return tuple(constant for constant in self.constants if constant.until in ("layers", "step"))

    @cached_property
    def kept_once(self) -> int:
        """What one micro-batch keeps from forward to backward on this device."""
        each = sum(int(constant.leaf.total) for constant in self.kept_constants if constant.each)
        return self.kept_by_segments + each + self.received

    @cached_property
    def kept_waiting(self) -> int:
        """What another micro-batch in flight keeps: its input lies in a buffer of its own where the stage has such."""
        ends = self.stage.first or not self.segments or not self.segments[0].keeps_input
        return self.kept_once - (self.segments[0].bytes.input if self.full_weights.holds_gradients and not ends else 0)

    @cached_property
    def received(self) -> int:
        """The input that came from the stage before, which backward needs again, unless the first layer keeps it itself."""
        if self.stage.first or not self.segments or self.segments[0].keeps_input or self.full_weights.holds_gradients:
            return 0
        return self.segments[0].bytes.input

    @cached_property
    def ddp_buckets(self) -> int:
        """DistributedDataParallel's flat buckets, made when it wraps the model: a second copy of every gradient.

        ZeRO-1 (ZeroRedundancyOptimizer) has them too; where main gradients exist (Megatron), they are the buckets.
        """
        alone = self.plan.dp * self.plan.cp == 1 or self.engine
        none = alone or self._main_gradients or self.plan.zero > 1 or not self.plan.transformers
        return 0 if none else self.states[1]

    @cached_property
    def activations(self) -> int:
        """Everything besides the states at the end of forward, once only the loss is kept."""
        constants = sum(int(constant.leaf.total) for constant in self.kept_constants)
        return constants + self.received + self.ddp_buckets + self.kept_by_segments + self.full_weights.kept_bytes

    @cached_property
    def constant_activations(self) -> int:
        """The part of the activations that does not grow with the batch: tables, weight copies, buffers, gathered weights."""
        fixed = sum(int(each.leaf.total) for each in self.kept_constants if not each.each or each.fixed)
        blocks = sum((run.stop - run.start) * run.segment.bytes.fixed for run in self.runs)
        return fixed + self.ddp_buckets + blocks + self.full_weights.kept_bytes

    @cached_property
    def _main_gradients(self) -> bool:
        return any(state.name == "main_gradient" for state in RECIPES[self.plan.recipe].states)

    @cached_property
    def accumulates(self) -> bool:
        """Whether gradients are there before the backward begins: main gradients are, and those of earlier micro-batches."""
        buffered = self._main_gradients or (self.engine and self.plan.zero == 3)  # their buffer is always there
        earlier = self.plan.microbatches > 1 and not self.full_weights.holds_gradients
        return (buffered or earlier) and not self.streams

    @property
    def streams(self) -> bool:
        """Whether gradients leave for the host while backward runs."""
        return self.plan.offload != "none"

    @cached_property
    def adds_at_once(self) -> bool:
        """Whether each new gradient is added to one that is there, and freed; sharded gradients wait for their layer."""
        if self.bucketed or self.plan.optimizer_in_backward:
            return True
        return self.accumulates and (self.plan.zero < 2 or self.plan.shards == 1)

    @property
    def engine(self) -> bool:
        """Whether DeepSpeed's engine has the weights, gradients and optimizer."""
        return self.plan.implementation == "deepspeed"

    @property
    def bucketed(self) -> bool:
        """Whether each gradient goes into DeepSpeed's buckets as soon as it is there."""
        return self.engine and self.plan.zero > 1

    @cached_property
    def partition(self) -> int:
        """DeepSpeed's flat shard of the gradients of the micro-batch that runs, in stage 2; stage 3 has one buffer for all."""
        return partition_bytes(self.plan, self.groups, self.key) if self.bucketed else 0

    def waits_gathered(self, segment: Segment) -> bool:
        """Whether its gradients wait unsharded, or leave, among what is gathered."""
        return self.full_weights.active and (self.streams or (self.full_weights.waits and not segment.inside))

    def live_parts(self, phase: str, index: int = -1, at: str = "block") -> Iterator[tuple[str, int]]:
        """What is alive at a moment of the step, part by part, with its bytes. A breakdown shows the same parts as leaves.

        `phase`: "forward", "backward", "step" or the name of a pass. `index` and `at`: as those of `Moment`.
        """
        parameters, gradients, optimizer = self.states
        yield "parameters", parameters
        yield "optimizer", optimizer
        yield "ddp_buckets", self.ddp_buckets
        yield "constants", self._constant_bytes(phase, index)
        if phase == "step":
            yield "gradients", gradients
            yield "optimizer_step", self.step_bytes
            return
        if phase not in ("forward", "backward"):
            yield "pass", self.pass_of(phase).bytes.forward_peak
            return
        yield "gradients", gradients if self.accumulates else 0
        yield "received", 0 if phase == "forward" and index == 0 else self.received
        if index < 0:
            return
        run = self.run_of(index)
        before = index - run.start
        cached = run.cached + before * run.segment.bytes.cached if phase == "forward" else 0
        yield "segments", run.kept + before * self.kept_of(run.segment) + cached
        if phase == "backward":
            yield "gradient_partition", 0 if index == len(self.segments) - 1 else self.partition
            yield "later_gradients", self.later_gradients(index)
        yield "gathered", self.full_weights.sizes(phase, index, at)[0]
        yield "working", self._working(phase, run.segment, at)

    def pass_of(self, phase: str) -> Segment:
        """The pass of that name."""
        return next(found for found in self.passes if found.path[0] == phase)

    def later_gradients(self, index: int) -> int:
        """The gradients that the segments after one have left when its backward begins."""
        run = self.run_of(index)
        after = run.stop - 1 - index
        if self.streams:  # all but those of the segment just after have left
            return run.gradients if after else run.later
        return run.later + after * run.gradients

    def constants_alive(self, phase: str, index: int) -> list[Constant]:
        """The constants that are there while a segment runs (-1: between the phases)."""
        segment = self.segments[index] if index >= 0 else None
        until = {"step"}
        if phase == "step":
            until.add("end")
        elif phase == "forward":
            until |= {"layers", "stack"} if segment and segment.inside else {"layers"}
            late = segment is None
            return [each for each in self.constants if each.until in until and (late or not each.late)]
        elif phase == "backward":
            until |= set() if segment and segment.path == EMBEDDING else {"layers"}
            until |= {"backward"} if segment else set()
        return [each for each in self.constants if each.until in until]

    @cached_property
    def _constant_sums(self) -> dict[tuple[str, bool, bool, bool], int]:
        return {}

    def _constant_bytes(self, phase: str, index: int) -> int:
        segment = self.segments[index] if index >= 0 else None
        case = (
            phase,
            segment is None,
            segment is not None and segment.inside,
            segment is not None and segment.path == EMBEDDING,
        )
        if case not in self._constant_sums:
            self._constant_sums[case] = sum(int(each.leaf.total) for each in self.constants_alive(phase, index))
        return self._constant_sums[case]

    def _working(self, phase: str, segment: Segment, at: str) -> int:
        if at != "block":
            return sum(self.around(phase, segment, at).values())
        if phase == "forward":
            return segment.bytes.forward_peak
        return segment.bytes.accumulating_peak if self.adds_at_once else segment.bytes.backward_peak

    def around(self, phase: str, segment: Segment, at: str) -> dict[str, int]:
        """What a segment holds before it runs and after, besides what is gathered."""
        sizes = segment.bytes
        if phase == "forward":
            return {"input": sizes.input}
        if at == "before":
            return {"kept": sizes.kept, "output_gradient": sizes.output_gradient}
        root = self.full_weights.waits and segment.path == EMBEDDING  # its gradients are among those of the root
        return {"input_gradient": sizes.input_gradient, "weight_gradients": 0 if root else sizes.weight_gradients}

    def _moment(self, phase: str, index: int, at: str) -> Moment:
        total = sum(size for _, size in self.live_parts(phase, index, at))
        shards = self.states[1] if self.accumulates else self.later_gradients(index) if phase == "backward" else 0
        return Moment(total, index, at, total - self.full_weights.sizes(phase, index, at)[1] - shards)

    def _moments(self, phase: str) -> Iterator[Moment]:
        """The points of a phase among which the highest is."""
        ats = ["block", *(["before"] if self.full_weights.active else [])]
        ats += ["after"] if self.full_weights.active and phase == "backward" else []
        for run in self.runs:
            for index in run.highest(neighbours=self.full_weights.active):
                yield from (self._moment(phase, index, at) for at in ats)

    @cached_property
    def moments(self) -> dict[str, Moment]:
        """The highest point of each phase."""
        found = {segment.path[0]: self._still(segment.path[0]) for segment in self.passes}
        for phase in ("forward", "backward"):
            found[phase] = max([self._still(phase), *self._highest[phase]])
        return {**found, "step": self._still("step")}

    def _still(self, phase: str) -> Moment:
        """The moment of a phase at which no segment runs."""
        return Moment(sum(size for _, size in self.live_parts(phase)), -1)

    @cached_property
    def _highest(self) -> dict[str, list[Moment]]:
        return {phase: list(self._moments(phase)) for phase in ("forward", "backward")}

    @cached_property
    def own_bytes(self) -> int:
        """The highest point of the pool of the stream that computes, in forward and backward."""
        return max((moment.own for found in self._highest.values() for moment in found), default=0)

    @cached_property
    def step(self) -> StepBytes:
        """What the optimizer's step makes and frees, by its kernel: the other kernels' are 0."""
        if self.plan.optimizer_in_backward:
            return StepBytes(0, one_weight_step(self.groups, self.key, self.plan.optimizer_kernel), 0)
        apart = self.streams or self.engine  # the host's, or among the engine's buffers
        found = [(group_step(tensors, self.key), count) for tensors, count in self.groups if count and not apart]
        kernel = self.plan.optimizer_kernel
        return StepBytes(
            sum(group.foreach * count for group, count in found) if kernel == "foreach" else 0,
            max((group.loop for group, _ in found), default=0) if kernel == "loop" else 0,
            max((group.matrix for group, _ in found), default=0),
        )

    @property
    def step_bytes(self) -> int:
        """The most of it at a time: Muon's matrices and AdamW's other tensors come one after the other."""
        return max(self.step)
