"""Real pipeline schedules of torch.distributed.pipelining, a stage a rank, against the simulation fed with the measured times.

Each operation is timed alone, waits and messages excluded, so that the simulation's utilization is what the schedule allows at these
times, and what the measured one lacks of it went into messages and the host. On CPUs with fewer cores than ranks the operations
of one stage slow down those of another, and the times say so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from calc.measurements.records import Measured
from calc.pipeline import SCHEDULES, PipelineAnswer, PipelinePlan, simulate
from measure.distributed.group import Group
from measure.timing import spread

CASES: Final = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))  # schedule, chunks a rank
_STEPS: Final = 3  # timed, after one that is not


@dataclass(frozen=True, slots=True)
class Size:
    """`tokens` rows of one micro-batch, `hidden` wide, through `blocks` feed-forward blocks a rank, whatever the chunks."""

    tokens: int
    hidden: int
    blocks: int


SIZES: Final[Mapping[str, Size]] = {"small": Size(64, 256, 2), "medium": Size(512, 1024, 4)}


class Op(NamedTuple):
    """An operation as it ran: F or B, the part of the model, the micro-batch; seconds from the step's common start."""

    kind: str
    part: int
    microbatch: int
    start: float
    end: float


class _Clock:
    """Marks in time on one device: the host's clock, or on a GPU events, so that nothing waits for a mark."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to the other, once the device is done."""
        return float(start.elapsed_time(end) / 1e3 if self._on_gpu else end - start)


class _TimedStage(PipelineStage):
    """A stage that writes down when it computes what."""

    def __init__(self, module: nn.Module, part: int, parts: int, group: Group, clock: _Clock) -> None:
        super().__init__(module, part, parts, group.device)
        self._clock = clock
        self.marks: list[tuple[str, int, int, Any, Any]] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        start = self._clock.mark()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.marks.append(("F", self.stage_index, fwd_chunk_id, start, self._clock.mark()))
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        start = self._clock.mark()
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.marks.append(("B", self.stage_index, bwd_chunk_id, start, self._clock.mark()))


def run(group: Group, size: str) -> Iterator[Measured]:
    """For each schedule: `operations_in_order`, `utilization`, `makespan` in seconds."""
    for index, (schedule, chunks) in enumerate(CASES):
        microbatches = 2 * group.size
        case = f"{group.size} ranks, {group.backend}, {size}, {schedule}, {microbatches} micro-batches, {chunks} chunks a rank"
        group.tell(index / len(CASES), case)
        steps = [group.gather(step) for step in _steps(group, SIZES[size], schedule, chunks, microbatches)]
        yield from rows_of(case, schedule, chunks, microbatches, steps)


def _steps(group: Group, size: Size, schedule: str, chunks: int, microbatches: int) -> Iterator[list[Op]]:
    """This rank's operations of each timed step."""
    clock = _Clock(group.device)
    parts = [chunk * group.size + group.rank for chunk in range(chunks)]
    torch.manual_seed(group.rank)
    stages = [
        _TimedStage(_model(size, size.blocks // chunks, group.device), part, chunks * group.size, group, clock)
        for part in parts
    ]
    build: Any = getattr(schedules, SCHEDULES[schedule].pytorch)
    program = build(stages if chunks > 1 else stages[0], microbatches, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(size.tokens * microbatches, size.hidden, device=group.device)
    for step in range(1 + _STEPS):
        for stage in stages:
            stage.marks.clear()
            stage.submod.zero_grad(set_to_none=True)
        group.wait_for_all()
        begin = clock.mark()
        _step(program, group, batch)
        group.finish()
        if step:
            marks = [mark for stage in stages for mark in stage.marks]
            ops = [
                Op(kind, part, microbatch, clock.seconds(begin, start), clock.seconds(begin, end))
                for kind, part, microbatch, start, end in marks
            ]
            yield sorted(ops, key=lambda op: op.start)


def _step(program: Any, group: Group, batch: Tensor) -> None:
    inputs = (batch,) if group.rank == 0 else ()
    target = {"target": batch, "losses": []} if group.rank == group.size - 1 else {}
    program.step(*inputs, **target)


class _Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


def _model(size: Size, blocks: int, device: torch.device) -> nn.Module:
    with device:
        return nn.Sequential(*(_Block(size.hidden) for _ in range(blocks)))


Steps = list[list[list[Op]]]  # by step, rank, time


def _simulated(steps: Steps, schedule: str, chunks: int, microbatches: int) -> PipelineAnswer:
    """The schedule on paper, each part of the model with the median times that it took."""
    ranks = len(steps[0])
    times: dict[tuple[str, int], list[float]] = {}
    for step in steps:
        for op in (op for rank in step for op in rank):
            times.setdefault((op.kind, op.part), []).append(op.end - op.start)
    forward, backward = (tuple(median(times[kind, part]) for part in range(ranks * chunks)) for kind in "FB")
    plan = PipelinePlan(
        schedule=schedule,
        stages=ranks,
        microbatches=microbatches,
        virtual_stages=chunks,
        forward=forward,
        backward_input=backward,
        backward_weight=(0.0,),  # no schedule here splits the backward
    )
    return simulate(plan)


def rows_of(case: str, schedule: str, chunks: int, microbatches: int, steps: Steps) -> Iterator[Measured]:
    """Timed steps against the simulation with their median times."""
    answer = _simulated(steps, schedule, chunks, microbatches)
    expected = [
        [
            (event.kind, answer.plan.model_stage(rank, event.chunk), event.microbatch)
            for event in answer.timeline
            if event.stage == rank
        ]
        for rank in range(answer.plan.stages)
    ]
    alike = min(_in_order(expected, step) for step in steps)
    yield Measured(case, "operations_in_order", sum(len(ops) for ops in expected), alike, "operations")
    makespans = [max(op.end for rank in step for op in rank) for step in steps]
    busy = [sum(op.end - op.start for rank in step for op in rank) for step in steps]
    used = spread([each / (answer.plan.stages * span) for each, span in zip(busy, makespans, strict=True)])
    yield Measured(case, "utilization", answer.utilization, used.median, "", used.p20, used.p80)
    span = spread(makespans)
    yield Measured(case, "makespan", answer.makespan, span.median, "seconds", span.p20, span.p80)


def _in_order(expected: list[list[tuple[str, int, int]]], step: list[list[Op]]) -> int:
    """How many operations ran at the place in their rank's order that the simulation gives them."""
    return sum(
        op == found[:3] for ops, ran in zip(expected, step, strict=True) for op, found in zip(ops, ran, strict=True)
    )
