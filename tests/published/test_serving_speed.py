"""Serving speed on 600 published runs: better than aiconfigurator for every engine, and as close as the bands that answers carry say."""

from collections import defaultdict

import pytest

from calc.serving.speed.estimate import ERRORS
from tests.published.serving_speed import Errors, errors, flat, plan_of, rows


@pytest.fixture(scope="module")
def found():
    return list(errors(rows()))


def shares(values):
    sizes = sorted(abs(value) for value in values)
    return sizes[len(sizes) // 2], sizes[int(0.9 * len(sizes))]


def test_every_row_has_an_answer(found):
    assert len(found) == len(rows()) == 600


@pytest.mark.parametrize("engine", ["sglang", "trtllm", "vllm"])
@pytest.mark.parametrize("what", ["tpot", "ttft"])
def test_the_errors_of_each_engine_are_below_those_of_aiconfigurator(found, engine, what):
    own = [each for each in found if each.row["engine"] == engine and each.row[f"theirs_{what}_ms"]]
    assert len(own) >= 50
    theirs = shares(each.row[f"theirs_{what}_ms"] / each.row[f"{what}_ms"] - 1 for each in own)
    ours = shares(getattr(each, what) for each in own)
    assert ours[0] < theirs[0]
    assert ours[1] < theirs[1]


@pytest.mark.parametrize("engine", ["sglang", "trtllm", "vllm"])
def test_plain_plans_are_nearer_than_aiconfigurator_in_the_median(engine):
    own = [each for each in errors(rows(), recipes=False) if each.row["engine"] == engine]
    for what in ("tpot", "ttft"):
        theirs = [row for each in own if (row := each.row)[f"theirs_{what}_ms"]]
        ours = shares(getattr(each, what) for each in own if each.row[f"theirs_{what}_ms"])
        assert ours[0] < shares(row[f"theirs_{what}_ms"] / row[f"{what}_ms"] - 1 for row in theirs)[0]


def test_the_bands_of_answers_are_the_record(found):
    first, each = ERRORS["measured"]
    assert shares(row.ttft for row in found)[1] == pytest.approx(first, abs=0.02)
    assert shares(row.tpot for row in found)[1] == pytest.approx(each, abs=0.02)


def test_the_medians_stay_where_they_are(found):
    assert shares(row.tpot for row in found)[0] < 0.12
    assert shares(row.ttft for row in found)[0] < 0.27
    assert (
        shares(row.roofline_tpot for row in found)[0] > 0.6
    )  # what launches, small matmuls and prompts next to decoding add


def test_no_engine_is_off_to_one_side(found):
    signed = defaultdict(list)
    for each in found:
        signed[each.row["engine"]].append(each.tpot)
    assert all(abs(sorted(values)[len(values) // 2]) < 0.12 for values in signed.values())


def test_a_row_as_it_is_handed_on_becomes_the_same_plan():
    row = {
        "id": "x",
        "source": "aiconfigurator-core 0.12.0 silicon_sample.csv line 4021 (inferencex-2026-04-06, measured 2026-02-06)",
        "engine": "trtllm",
        "engine_version": "1.2.0rc6.post3",
        "model": "deepseek-r1",
        "gpu": "b200-180gb",
        "precision": "fp4",
        "isl": 1024,
        "osl": 1024,
        "concurrency": 64,
        "tp": 1,
        "ep": 8,
        "dp": 8,
        "ttft_ms": 1085.456,
        "tpot_ms": 12.2895,
        "notes": "",
        "aiconfigurator": None,
    }
    plan = plan_of(flat(row))
    assert (plan.draft_tokens, plan.stream_steps, plan.gather_steps, plan.length_spread) == (1, 10, 60, 0.2)
    assert plan.max_batched_tokens == 1152  # one prompt, and two tokens of eight sequences
    assert plan_of(flat(row), recipes=False).draft_tokens == 0
    assert Errors._fields[1:] == ("ttft", "tpot", "roofline_ttft", "roofline_tpot")
