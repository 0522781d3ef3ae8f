"""The `simulate` answer: arrivals, tails, waste, separated prefill and fleets."""

import json

import pytest

from calc.catalogue import load
from calc.errors import InputError, validated
from calc.hardware import gpu
from calc.serving.simulation import SimulationPlan, simulate_serving
from calc.serving.simulation.replica import Request
from calc.serving.simulation.statistics import tail, waste
from calc.serving.simulation.workload import requests_of

MODEL, H100 = load("meta-llama-3.1-8b"), gpu("h100-sxm-80gb")


def plan(**changes):
    fields = {"engine": "vllm", "prompt": 1024, "output": 128, "context": 2048, "concurrency": 16, "requests": 160}
    return validated(SimulationPlan, {**fields, **changes})


def test_the_answer_is_json_whose_seconds_sum():
    answer = simulate_serving(MODEL, plan(price_per_gpu_hour=2.0), H100)
    shown = json.loads(json.dumps(answer.as_json()))
    assert sum(part["value"] for part in shown["components"]) == pytest.approx(shown["seconds"])
    assert shown["ttft_s"]["p50"] <= shown["ttft_s"]["p95"] <= shown["ttft_s"]["p99"]
    assert shown["tokens_per_s"] == pytest.approx(160 * 128 / shown["seconds"])
    assert shown["cost_per_million_tokens"] == pytest.approx(2 / 3600 / shown["tokens_per_s"] * 1e6)
    assert shown["fleet"] is None


def test_poisson_arrivals_come_at_their_rate_and_a_seed_repeats_them():
    asked = plan(arrivals="poisson", rate=5.0, requests=4000)
    first, again = requests_of(asked), requests_of(asked)
    assert first == again
    assert first[-1].arrival == pytest.approx(4000 / 5, rel=0.05)
    assert requests_of(plan(arrivals="poisson", rate=5.0, requests=4000, seed=1)) != first


def test_lists_are_pasted_as_text():
    asked = plan(arrivals="list", arrival_times="0 1.5,\n3", prompt_lengths="100, 200", output_lengths="10")
    found = requests_of(asked)
    assert [(each.arrival, each.prompt, each.output) for each in found] == [
        (0.0, 100, 10),
        (1.5, 200, 10),
        (3.0, 100, 10),
    ]


def test_a_common_prefix_is_computed_once_and_kept_once():
    asked = plan(shared_prefix=512, samples=2)
    found = requests_of(asked)
    assert (found[0].cached, found[1].cached, found[1].shared) == (0, 512, 512)
    shared, apart = (simulate_serving(MODEL, each, H100) for each in (asked, plan(samples=2)))
    assert shared.most_cached < apart.most_cached
    assert shared.seconds < apart.seconds


def test_blocks_waste_less_than_room_for_the_longest():
    found = waste([Request(9, 1)], 4, 100)
    assert found.paged == pytest.approx(1 - 10 / 12)  # ten tokens in three blocks of four
    assert found.reserved == pytest.approx(0.9)
    exact = waste([Request(3, 6)], 4, 16)
    assert exact.paged == pytest.approx(1 - (4 + 5 + 6 + 7 + 8 + 9) / (4 + 8 * 4 + 12))


def test_separated_prompts_do_not_delay_decoding():
    together = simulate_serving(MODEL, plan(arrivals="poisson", rate=12.0, prompt=1900, requests=300), H100)
    apart = simulate_serving(
        MODEL, plan(arrivals="poisson", rate=12.0, prompt=1900, requests=300, prefill_replicas=1), H100
    )
    assert apart.gpus == 2
    assert apart.latencies.itl.p99 < together.latencies.itl.p99
    assert apart.latencies.tpot.mean < together.latencies.tpot.mean


def test_a_fleet_grows_with_its_traffic_and_says_why_none_is_enough():
    fleets = [
        simulate_serving(
            MODEL, plan(traffic=traffic, target_ttft_s=1.0, target_tpot_s=0.02, price_per_gpu_hour=2.0), H100
        ).fleet
        for traffic in (10, 80)
    ]
    assert fleets[0].replicas < fleets[1].replicas
    assert fleets[1].gpus == fleets[1].replicas
    assert fleets[1].cost_per_hour == 2.0 * fleets[1].gpus
    assert fleets[1].tpot_p95_s <= 0.02
    none = simulate_serving(MODEL, plan(traffic=10, target_tpot_s=0.0001, requests=20), H100).fleet
    assert none.replicas is None
    assert "replicas do not" in none.why_not


def test_a_weighted_tail():
    found = tail([1.0, 10.0], [99.0, 1.0])
    assert (found.p50, found.p95, found.mean) == (1.0, 1.0, pytest.approx(1.09))
    assert tail([]).mean == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrivals": "poisson"}, "poisson needs a rate"),
        ({"rate": 3.0}, "others take none"),
        ({"arrivals": "list"}, "arrival_times"),
        ({"prefill_replicas": 1}, "not closed"),
        ({"traffic": 3.0}, "needs a target"),
        ({"arrival_times": "1 x", "arrivals": "list"}, "arrival_times"),
        ({"prompt_lengths": "0"}, "prompt_lengths"),
        ({"requests": 0}, "requests"),
    ],
)
def test_bad_plans_are_one_line(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        plan(**changes)
    assert "\n" not in str(caught.value)


def test_no_gpu_is_refused():
    with pytest.raises(InputError, match="gpu: none is given"):
        simulate_serving(MODEL, plan())
