"""What holds for every schedule, layout and set of times."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calc.pipeline import SCHEDULES, PipelinePlan, simulate

CHUNKS = {"one": st.just(1), "two": st.just(2), "any": st.integers(1, 4)}
# Quarters of a second, and what up to four chunks share of three of them, add up exactly: the checks need no tolerance.
QUARTERS = st.integers(0, 16).map(lambda quarters: 3 * quarters / 4)


@st.composite
def plans(draw: st.DrawFn, even: bool = False) -> PipelinePlan:
    schedule = draw(st.sampled_from(list(SCHEDULES)))
    stages = draw(st.integers(1, 7))
    chunks = draw(CHUNKS[SCHEDULES[schedule].chunks])
    fewest = 2 * stages if schedule == "dualpipe-v" else 1
    microbatches = draw(st.integers(fewest, fewest + 24))
    sizes = [1] if even else sorted({1, stages, stages * chunks})

    def times(strategy: st.SearchStrategy[float]) -> tuple[float, ...]:
        size = draw(st.sampled_from(sizes))
        return tuple(draw(st.lists(strategy, min_size=size, max_size=size)))

    return PipelinePlan(
        schedule=schedule,
        stages=stages,
        microbatches=microbatches,
        virtual_stages=chunks,
        forward=times(QUARTERS.filter(bool)),
        backward_input=times(QUARTERS),
        backward_weight=times(QUARTERS),
    )


def part_of(plan: PipelinePlan, stage: int, chunk: int) -> int:
    if SCHEDULES[plan.schedule].shape == "v":
        return stage if chunk == 0 else 2 * plan.stages - 1 - stage
    return chunk * plan.stages + stage


@given(plans())
@settings(max_examples=300, deadline=None)
def test_every_operation_starts_the_moment_its_rank_is_free_and_its_inputs_are_there(plan):
    ends = {}
    answer = simulate(plan)
    for event in answer.timeline:
        part = part_of(plan, event.stage, event.chunk)
        ends["I" if event.kind == "B" else event.kind, part, event.microbatch] = event.end
    last = plan.stages * plan.chunks - 1
    free = [0.0] * plan.stages
    for event in answer.timeline:
        part, microbatch = part_of(plan, event.stage, event.chunk), event.microbatch
        needs = {
            "F": [("F", part - 1, microbatch)] if part else [],
            "W": [("I", part, microbatch)],
        }.get(event.kind, [("F", part, microbatch), *([("I", part + 1, microbatch)] if part < last else [])])
        assert event.start == max([free[event.stage], *(ends[need] for need in needs)])
        free[event.stage] = event.end


@given(plans())
@settings(max_examples=200, deadline=None)
def test_every_micro_batch_passes_every_chunk_once_forward_and_once_backward(plan):
    forward, inputs, weight = (plan.seconds(name) for name in ("forward", "backward_input", "backward_weight"))
    passes: Counter[tuple[str, int, int]] = Counter()
    for event in simulate(plan).timeline:
        part = part_of(plan, event.stage, event.chunk)
        seconds = {"F": forward[part], "I": inputs[part], "W": weight[part], "B": inputs[part] + weight[part]}
        assert event.end - event.start == seconds[event.kind]
        for kind in "IW" if event.kind == "B" else event.kind:
            passes[kind, part, event.microbatch] += 1
    parts = plan.stages * plan.chunks
    assert passes == Counter(
        {
            (kind, part, microbatch): 1
            for kind in "FIW"
            for part in range(parts)
            for microbatch in range(plan.microbatches)
        }
    )


@given(plans())
@settings(max_examples=200, deadline=None)
def test_work_is_conserved_and_work_and_bubble_make_the_whole(plan):
    answer = simulate(plan)
    work = plan.microbatches * sum(sum(plan.seconds(name)) for name in ("forward", "backward_input", "backward_weight"))
    assert sum(rank.busy for rank in answer.ranks) == work
    assert answer.utilization == work / (plan.stages * answer.makespan)
    assert answer.utilization + answer.bubble_fraction == 1
    assert 0 <= answer.bubble_fraction < 1
    assert 0 <= answer.span_bubble <= answer.makespan
    assert answer.breakdown.total == plan.stages * answer.makespan
    assert all(row.value >= 0 for row in answer.breakdown.rows())


@given(plans(even=True))
@settings(max_examples=400, deadline=None)
def test_a_closed_form_whose_assumptions_hold_is_what_the_simulation_finds(plan):
    answer = simulate(plan)
    for form in answer.closed_forms:
        if form.applies:
            assert answer.simulated(form.quantity) == pytest.approx(form.value, rel=1e-12), form


@given(plans())
@settings(max_examples=100, deadline=None)
def test_twice_the_times_give_twice_the_seconds_and_the_same_fractions(plan):
    doubled = plan.model_copy(
        update={
            name: tuple(2 * time for time in getattr(plan, name))
            for name in ("forward", "backward_input", "backward_weight")
        }
    )
    one, two = simulate(plan), simulate(doubled)
    assert two.makespan == 2 * one.makespan
    assert two.span_bubble == 2 * one.span_bubble
    assert two.utilization == one.utilization
