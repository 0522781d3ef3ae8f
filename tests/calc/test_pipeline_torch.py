"""The orders are those that `torch.distributed.pipelining` runs, operation by operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from calc.pipeline import SCHEDULES, PipelinePlan, simulate

pytestmark = pytest.mark.torch

STAGES, MICROBATCHES, CHUNKS = range(1, 7), range(1, 20), (1, 2, 3)


class Stage:
    """As much of a PipelineStage as a schedule needs to lay out its order; it writes down what it is told to compute."""

    def __init__(self, index: int, count: int, ranks: int, rank: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, count, ranks, rank
        self.is_first, self.is_last = index == 0, index == count - 1
        self.submod = None
        self.ran: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.ran.append(("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.ran.append(("B", self.stage_index, microbatch))

    def no_messages(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def perform_reduce_grad(self, scale: int) -> None:
        pass


def parts_of(schedule: str, ranks: int, chunks: int, rank: int) -> list[int]:
    if SCHEDULES[schedule].shape == "v":
        return [rank, 2 * ranks - 1 - rank]
    return [chunk * ranks + rank for chunk in range(chunks)]


def ours(schedule: str, ranks: int, microbatches: int, chunks: int) -> list[list[tuple[str, int, int]]]:
    plan = PipelinePlan(schedule=schedule, stages=ranks, microbatches=microbatches, virtual_stages=chunks)
    orders: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    for event in simulate(plan).timeline:
        part = parts_of(schedule, ranks, chunks, event.stage)[event.chunk]
        orders[event.stage].append((event.kind, part, event.microbatch))
    return orders


def build(schedule: str, ranks: int, microbatches: int, chunks: int) -> Any:
    """PyTorch's schedule object (on rank 0), or None where PyTorch refuses the layout."""
    from torch.distributed.pipelining import schedules

    stages = [Stage(part, ranks * chunks, ranks, 0) for part in parts_of(schedule, ranks, chunks, 0)]
    try:
        return getattr(schedules, SCHEDULES[schedule].pytorch)(stages, microbatches)
    except ValueError:
        return None


def flat(actions: list[Any]) -> Iterator[tuple[str, int, int]]:
    """The compute actions, without pauses; the two of an overlapped pair one after the other, as PyTorch runs them."""
    for action in actions:
        for single in () if action is None else action.sub_actions or (action,):
            yield single.computation_type.value, single.stage_index, single.microbatch_index


@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v"])
def test_the_order_of_a_multi_stage_schedule_is_pytorchs(schedule):
    compared = 0
    for ranks in STAGES:
        for microbatches in MICROBATCHES:
            for chunks in CHUNKS if SCHEDULES[schedule].chunks == "any" else (2,):
                theirs = build(schedule, ranks, microbatches, chunks)
                if theirs is not None:
                    expected = [list(flat(theirs.pipeline_order[rank])) for rank in range(ranks)]
                    assert ours(schedule, ranks, microbatches, chunks) == expected, (ranks, microbatches, chunks)
                    compared += 1
    assert compared >= 70


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_order_of_a_single_stage_schedule_is_what_pytorch_runs(schedule):
    """Held against the running program: the `pipeline_order` of Schedule1F1B, which is only for display, begins its last
    rank with micro-batch 1."""
    from torch.distributed.pipelining import schedules

    compared = 0
    for ranks in STAGES:
        for microbatches in range(ranks if schedule == "1f1b" else 1, 20):  # PyTorch's 1F1B wants m >= p
            expected = []
            for rank in range(ranks):
                stage = Stage(rank, ranks, ranks, rank)
                program = getattr(schedules, SCHEDULES[schedule].pytorch)(stage, microbatches)
                program._initialize_stage = lambda *args: None
                program._step_microbatches([()] * microbatches, [{}] * microbatches)
                expected.append(stage.ran)
            assert ours(schedule, ranks, microbatches, 1) == expected, (ranks, microbatches)
            compared += 1
    assert compared >= 90


def test_zb_h1_is_pytorchs_zero_bubble_schedule_with_one_chunk_a_rank():
    for ranks in STAGES:
        for microbatches in MICROBATCHES:
            theirs = build("interleaved-zb", ranks, microbatches, 1)
            if theirs is not None:
                expected = [list(flat(theirs.pipeline_order[rank])) for rank in range(ranks)]
                assert ours("zb-h1", ranks, microbatches, 1) == expected, (ranks, microbatches)


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches"),
    [("1f1b", 4, 3), ("interleaved", 4, 11), ("interleaved-zb", 4, 11), ("interleaved", 3, 11)],
)
def test_layouts_that_pytorch_refuses_still_have_an_answer(schedule, ranks, microbatches):
    if schedule != "1f1b":
        assert build(schedule, ranks, microbatches, 2) is None
    answer = simulate(PipelinePlan(schedule=schedule, stages=ranks, microbatches=microbatches))
    assert 0 < answer.utilization < 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_dualpipes_own_bubble_holds_when_an_overlapped_pair_hands_on_nothing_before_its_end(ranks):
    microbatches = 4 * ranks
    theirs = build("dualpipe-v", ranks, microbatches, 2)
    makespan = _run_in_blocks([[a for a in theirs.pipeline_order[rank] if a] for rank in range(ranks)], 2 * ranks)
    two = dict.fromkeys(("forward", "backward_input", "backward_weight"), 2)  # of a rank: one for each of its chunks
    answer = simulate(PipelinePlan(schedule="dualpipe-v", stages=ranks, microbatches=microbatches, **two))
    (published,) = (form for form in answer.closed_forms if form.quantity == "makespan_bubble")
    assert makespan - microbatches * 2 * 3 == published.value
    assert answer.makespan_bubble == (ranks - 1) < published.value


def _run_in_blocks(orders: list[list[Any]], parts: int) -> int:
    """The makespan with F = I = W = 1 when an overlapped pair waits for the inputs of both and delivers both at its end."""
    ends: dict[tuple[str, int, int], int] = {}
    free, at = [0] * len(orders), [0] * len(orders)
    while any(position < len(order) for position, order in zip(at, orders, strict=True)):
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                ops = list(flat([order[at[rank]]]))
                needs = [("F", part - 1, mb) for kind, part, mb in ops if kind == "F" and part]
                needs += [("B", part + 1, mb) for kind, part, mb in ops if kind in "BI" and part < parts - 1]
                if any(need not in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = start + sum(2 if kind == "B" else 1 for kind, _, _ in ops)
                for kind, part, mb in ops:
                    ends["B" if kind == "I" else kind, part, mb] = free[rank]
                at[rank] += 1
    return max(free)
