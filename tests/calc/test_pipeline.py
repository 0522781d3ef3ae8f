"""Pipelines against the figures of the papers, and against what a layout may not be."""

from __future__ import annotations

import csv
import io
import json

import pytest

from calc.errors import InputError, validated
from calc.pipeline import SCHEDULES, PipelineAnswer, PipelinePlan, in_flight, simulate, weight_versions
from tests.latex import assert_formulas_hold, evaluate


def answer(
    schedule: str, stages: int, microbatches: int, virtual_stages: int | None = None, **times: object
) -> PipelineAnswer:
    values = {"schedule": schedule, "stages": stages, "microbatches": microbatches, "virtual_stages": virtual_stages}
    return simulate(validated(PipelinePlan, values | times))


@pytest.mark.parametrize(("microbatches", "percent"), [(1, 25.0), (4, 57.1), (13, 81.2)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_utilization_of_four_stages_is_that_of_the_gpipe_paper(schedule, microbatches, percent):
    got = answer(schedule, 4, microbatches, backward_input=2.0, backward_weight=1.5)
    assert got.utilization == microbatches / (microbatches + 3)
    assert round(100 * got.utilization, 1) == percent


@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_naive_model_parallelism_keeps_one_stage_of_four_busy(microbatches):
    assert answer("naive", 4, microbatches).utilization == 0.25


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream"])
@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 16])
def test_the_bubble_of_a_flush_is_p_minus_1_over_m_of_the_work(schedule, stages, microbatches):
    got = answer(schedule, stages, microbatches, forward=1, backward_input=2, backward_weight=3)
    assert got.makespan_bubble == (stages - 1) * 6
    assert got.bubble_over_ideal == pytest.approx((stages - 1) / microbatches, rel=1e-15)


@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs"])
@pytest.mark.parametrize("stages", [1, 2, 4, 6])
@pytest.mark.parametrize("virtual_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_v_chunks_a_rank_divide_the_bubble_by_v(schedule, stages, virtual_stages, rounds):
    got = answer(schedule, stages, rounds * stages, virtual_stages, backward_input=1.5, backward_weight=0.5)
    assert got.makespan_bubble == pytest.approx((stages - 1) * 3 / virtual_stages, abs=1e-9)
    assert got.bubble_over_ideal == pytest.approx((stages - 1) / (virtual_stages * rounds * stages), abs=1e-12)


def test_schedules_are_compared_at_equal_work():
    """A rank's chunks share its layers: every schedule works as long, and what differs is the waiting."""
    found = {name: answer(name, 4, 8) for name in ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")}
    assert {sum(rank.busy for rank in got.ranks) for got in found.values()} == {4 * 8 * 3.0}
    assert found["zb-v"].makespan < found["zb-h1"].makespan < found["1f1b"].makespan
    # 1F1B waits (p - 1)(F + I + W) = 9; ZB-V's chunks of half a rank's layers leave 1.5 of it
    assert (found["1f1b"].makespan, found["zb-v"].makespan) == (8 * 3 + 9, 8 * 3 + 1.5)


def test_a_send_delays_each_hop_but_not_the_turn_of_a_v():
    plain, sent = (answer("gpipe", 4, 1, send=send) for send in (0.0, 0.5))
    assert sent.makespan == plain.makespan + 2 * 3 * 0.5
    # four ranks of two chunks: three hops down and three up the V each way
    plain, sent = (answer("zb-v", 4, 1, send=send) for send in (0.0, 0.5))
    assert sent.makespan == plain.makespan + 2 * 6 * 0.5
    assert sent.closed_forms == ()


@pytest.mark.parametrize("times", [(1, 1, 1), (3, 4, 2), (3, 4, 3), (5, 2, 2), (2, 2, 0)])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 12), (8, 16)])
def test_zero_bubble_schedules_have_the_bubbles_of_their_paper(times, stages, microbatches):
    forward, inputs, weight = times
    given = {"forward": forward, "backward_input": inputs, "backward_weight": weight}
    hops = stages - 1
    assert answer("1f1b", stages, microbatches, **given).makespan_bubble == hops * (forward + inputs + weight)
    assert answer("zb-h1", stages, microbatches, **given).makespan_bubble == hops * (forward + inputs - weight)
    assert answer("zb-h2", stages, microbatches, **given).span_bubble == hops * (forward + inputs - 2 * weight)


def test_zb_v_with_four_stages_idles_3_of_the_makespan_and_nothing_of_any_span():
    got = answer("zb-v", 4, 8)
    assert (got.makespan, got.makespan_bubble, got.span_bubble) == (25.5, 1.5, 0)
    assert got.in_flight == (8, 8, 8, 8)


@pytest.mark.parametrize(
    ("schedule", "stored"), [("1f1b", 4), ("zb-h1", 4), ("zb-h2", 7), ("zb-v", 8), ("dualpipe-v", 9)]
)
def test_activation_memory_of_four_stages_is_that_of_the_papers(schedule, stored):
    assert max(answer(schedule, 4, 12).in_flight) == stored


def test_zero_bubble_schedules_hold_as_much_on_every_rank():
    assert answer("zb-h1", 4, 12).in_flight == (4, 4, 4, 4)
    assert answer("zb-h2", 4, 12).in_flight == (7, 7, 7, 7)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_micro_batches_in_flight_by_formula_are_those_counted_in_the_order(schedule, stages):
    for virtual_stages in {"one": (1,), "two": (2,), "any": (1, 2, 3)}[SCHEDULES[schedule].chunks]:
        for microbatches in range(2 * stages if schedule == "dualpipe-v" else 1, 4 * stages + 2):
            simulated = answer(schedule, stages, microbatches, virtual_stages).in_flight
            assert in_flight(schedule, stages, microbatches, virtual_stages) == simulated, (
                microbatches,
                virtual_stages,
            )


@pytest.mark.parametrize("stages", [1, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 16, 64])
def test_micro_batches_in_flight_follow_the_published_rules(stages, microbatches):
    ranks = range(stages)
    assert in_flight("1f1b", stages, microbatches) == tuple(min(microbatches, stages - rank) for rank in ranks)
    assert in_flight("gpipe", stages, microbatches) == (microbatches,) * stages
    for chunks in (1, 2, 4) if microbatches % stages == 0 else ():
        assert in_flight("interleaved", stages, microbatches, chunks) == tuple(
            min(microbatches * chunks, 2 * (stages - rank - 1) + (chunks - 1) * stages + 1) for rank in ranks
        )


def test_interleaved_holds_the_share_of_the_layers_that_megatron_gives():
    """Stage 0 holds L(1 + (p - 1)/(pv)) layers' activations: with p = 8, v = 3 and L = 96 that is 124 layers."""
    chunks = in_flight("interleaved", 8, 64, 3)[0]
    assert chunks * 96 / (8 * 3) == 96 * (1 + 7 / 24)


def test_pipedream_keeps_as_many_weight_versions_as_ranks_lie_ahead():
    assert weight_versions("pipedream", 4) == (4, 3, 2, 1)
    got = answer("pipedream", 4, 16)
    assert got.weight_versions == (4, 3, 2, 1)
    assert tuple(_versions_alive(rank.ops) for rank in got.ranks) == (4, 3, 2, 1)
    assert answer("1f1b", 4, 16).weight_versions == (1, 1, 1, 1)


def _versions_alive(ops: list[tuple[str, int, int]]) -> int:
    """The most versions of the weights at once when every backward updates them and must see its forward's version."""
    newest, used, most = 0, {}, 1
    for kind, _, microbatch in ops:
        if kind == "F":
            used[microbatch] = newest
        else:
            del used[microbatch]
            newest += 1
        most = max(most, len({*used.values(), newest}))
    return most


def test_a_slow_stage_sets_the_pace():
    got = answer("1f1b", 4, 100, forward=[1, 1, 4, 1], backward_input=[1, 1, 4, 1], backward_weight=[1, 1, 4, 1])
    # Stage 2 never waits once it has begun: two forwards come before its work, two backwards after it.
    assert got.makespan == 2 * 1 + 100 * 12 + 2 * 2
    assert got.closed_forms == ()


def test_times_may_be_given_for_each_rank_or_for_each_chunk_in_the_models_order():
    by_rank = answer("zb-v", 2, 4, forward=[1, 2])
    by_chunk = answer("zb-v", 2, 4, forward=[0.5, 1, 1, 0.5])
    assert by_rank.timeline == by_chunk.timeline
    looped = PipelinePlan(schedule="interleaved", stages=2, virtual_stages=2, forward="1, 2")
    assert looped.seconds("forward") == [0.5, 1, 0.5, 1]


def test_virtual_stages_left_out_are_the_schedules_own():
    assert [PipelinePlan(schedule=name).chunks for name in ("1f1b", "zb-h2", "interleaved", "zb-v")] == [1, 1, 2, 2]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 2, 0.5), ([1, 2, 1, 1.5], 1, [0, 1, 1, 3])])
def test_the_breakdown_sums_to_every_stages_makespan_and_each_leaf_shows_its_formula(schedule, times):
    forward, inputs, weight = times
    got = answer(schedule, 4, 9, forward=forward, backward_input=inputs, backward_weight=weight)
    assert got.breakdown.total == 4 * got.makespan
    assert_formulas_hold(got.breakdown)
    work = sum(row.value for row in got.breakdown.rows() if "/idle/" not in row.path)
    assert work / got.breakdown.total == got.utilization
    assert len(list(csv.DictReader(io.StringIO(got.breakdown.csv())))) == 4 * 6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_closed_form_evaluates_to_its_value_and_names_its_source(schedule):
    for form in answer(schedule, 4, 8, forward=3, backward_input=2.5, backward_weight=2).closed_forms:
        assert evaluate(form.formula, form.numbers) == pytest.approx(form.value, rel=1e-15)
        assert form.formula.source
        assert form.formula.url.startswith("https://")


def test_the_json_has_the_keys_of_the_command_line_and_survives_a_round_trip():
    got = answer("zb-v", 4, 8)
    payload = json.loads(json.dumps(got.as_json()))
    for key in (
        "utilization",
        "bubble_fraction",
        "makespan",
        "span_bubble",
        "in_flight",
        "weight_versions",
        "timeline",
    ):
        assert key in payload
    assert payload["timeline"][0] == {"stage": 0, "kind": "F", "microbatch": 0, "chunk": 0, "start": 0.0, "end": 0.5}
    assert len(payload["timeline"]) == 4 * 8 * 2 * 3
    assert sum(part["value"] for part in payload["components"]) == 4 * payload["makespan"]
    assert {form["quantity"]: (form["value"], form["simulated"]) for form in payload["closed_forms"]} == {
        "span_bubble": (0, 0.0),
        "in_flight": (8, 8),
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "2f2b"}, "schedule: '2f2b' is not allowed; it must be one of naive, gpipe, 1f1b"),
        ({"stages": 0}, "stages: 0 is not allowed; it must be greater than or equal to 1"),
        ({"stages": 1025}, "stages: 1025 is not allowed; it must be less than or equal to 1024"),
        ({"microbatches": "many"}, "microbatches: 'many' is not allowed"),
        ({"microbatches": 2.5}, "microbatches: 2.5 is not allowed"),
        ({"virtual_stages": 2}, "virtual_stages (2) must be 1 for schedule 1f1b"),
        ({"schedule": "zb-v", "virtual_stages": 3}, "virtual_stages (3) must be 2 for schedule zb-v"),
        (
            {"schedule": "dualpipe-v", "stages": 4, "microbatches": 7},
            "microbatches (7) must be at least 2 x stages (4) for schedule dualpipe-v",
        ),
        (
            {"stages": 512, "microbatches": 1024},
            "stages (512) x microbatches (1024) x virtual_stages (1) = 524288 must be at most 262144",
        ),
        (
            {"schedule": "zb-v", "stages": 512},
            "stages (512) x microbatches (1023 = 2 x stages - 1) x virtual_stages (2) = 1047552 must be at most 262144",
        ),
        ({"forward": [1, 2, 3]}, "forward has 3 times; it must have 1 or 4"),
        ({"forward": 0}, "forward: 0 is not allowed; each forward time must be above 0"),
        ({"forward": "1,x"}, "forward: '1,x' is not allowed; each time must be a number from 0 to 1e+09"),
        ({"backward_input": float("nan")}, "backward_input: nan is not allowed; each time must be a number"),
        ({"backward_weight": -1}, "backward_weight: -1 is not allowed; each time must be a number"),
        ({"backward_weight": []}, "backward_weight has 0 times; it must have 1 or 4"),
        ({"forward": True}, "forward: True is not allowed"),
        ({"colour": "red"}, "colour: unknown field; the known ones are backward_input"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_in_one_line_with_the_rule_and_the_values(values, message):
    with pytest.raises(InputError) as error:
        validated(PipelinePlan, values)
    assert str(error.value).startswith(message)


def test_in_flight_refuses_what_the_plan_refuses():
    with pytest.raises(InputError, match=r"virtual_stages \(2\) must be 1 for schedule gpipe"):
        in_flight("gpipe", 4, 8, 2)
    with pytest.raises(InputError, match="schedule: 'x' is not allowed; it must be one of naive"):
        in_flight("x", 4, 8)
