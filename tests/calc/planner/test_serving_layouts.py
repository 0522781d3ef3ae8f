"""Layouts of a service against a scan by plain loops, and questions that no layout answers."""

from __future__ import annotations

from itertools import product

import pytest

from calc.catalogue import load
from calc.errors import InputError
from calc.hardware import gpu
from calc.planner.serving_layouts import ServingSearchPlan, search_serving
from calc.serving import ServingPlan, serve
from calc.serving.speed.estimate import step_times

H100 = gpu("h100-sxm-80gb")


@pytest.mark.parametrize(("name", "gpus"), [("meta-llama-3.1-8b", 4), ("qwen3-30b-a3b", 4)])
def test_the_ranking_is_that_of_a_scan_of_every_layout_and_number_of_sequences(name, gpus):
    spec, tpot, ttft = load(name), 0.02, 1.0
    experts = name != "meta-llama-3.1-8b"
    best = {}
    for tp, pp, dp, ep in product((1, 2, 4), repeat=4):
        replica = tp * pp * dp
        if (
            replica > gpus
            or (not experts and dp * ep > 1)
            or (pp > 1 and dp > 1)
            or ep not in (1, tp * dp)
            or (dp > 1 and ep == 1)
        ):
            continue
        for count in [2**k for k in range(11)]:
            plan = ServingPlan(
                engine="vllm", tp=tp, pp=pp, dp=dp, ep=ep, prompt=2048, output=512, context=2560, concurrency=count
            )
            answer = serve(spec, plan, H100)
            if not answer.capacity.fits or answer.speed.tpot_s > tpot or answer.speed.ttft_s > ttft:
                continue
            rate = gpus // replica * answer.speed.tokens_per_s
            best[tp, pp, dp, ep] = max(best.get((tp, pp, dp, ep), 0.0), rate)
    found = search_serving(spec, ServingSearchPlan(gpus=gpus, tpot_s=tpot, ttft_s=ttft), H100)
    assert {one.key[:4] for one in found.layouts} == set(best)
    for one in found.layouts:  # the most that fit may lie between two powers of two
        assert one.tokens_per_s >= best[one.key[:4]]
    rates = [one.tokens_per_s for one in found.layouts]
    assert rates == sorted(rates, reverse=True)
    assert found.considered == len(found.layouts) + sum(found.rejected.values())


def test_users_decide_the_replicas_and_a_tighter_target_needs_no_fewer_gpus():
    spec = load("meta-llama-3.1-8b")
    loose, tight = (search_serving(spec, ServingSearchPlan(users=300, tpot_s=t), H100) for t in (0.05, 0.01))
    for answer in (loose, tight):
        best = answer.layouts[0]
        assert best.replicas * best.plan.concurrency >= 300 > (best.replicas - 1) * best.plan.concurrency
        assert best.served.speed.tpot_s <= answer.plan.tpot_s
        assert all(one.gpus >= best.gpus for one in answer.layouts)
    assert tight.layouts[0].gpus >= loose.layouts[0].gpus


def test_users_and_gpus_share_out_the_sequences():
    answer = search_serving(load("meta-llama-3.1-8b"), ServingSearchPlan(users=100, gpus=8), H100)
    assert {(one.gpus // (one.plan.tp * one.plan.pp), one.plan.concurrency) for one in answer.layouts} >= {
        (8, 13),
        (1, 100),
    }
    row = answer.as_json()["layouts"][0]
    assert row["cost_per_million_tokens"] == pytest.approx(3.78 * 8 / 3600 / row["tokens_per_s"] * 1e6)
    best = answer.layouts[0].served
    steps = step_times(best.spec, best.plan, best.gpu)
    running = min(best.plan.concurrency, best.speed.tokens_per_s * best.speed.tpot_s)
    exact = steps.components(running, best.plan.prompt_tokens + best.plan.output_tokens / 2)
    assert answer.breakdown.total == pytest.approx(sum(part.total for part in exact))
    assert answer.breakdown.total < row["tpot_s"]  # the prompts of others take their part


def test_what_no_layout_does_is_an_answer_with_reasons():
    spec = load("meta-llama-3.1-405b")
    answer = search_serving(spec, ServingSearchPlan(gpus=4), H100)
    assert answer.layouts == ()
    assert answer.rejected == {"memory exceeded": answer.considered}
    assert answer.as_json()["components"][0]["value"] == 0
    late = search_serving(load("meta-llama-3.1-8b"), ServingSearchPlan(gpus=1, tpot_s=1e-6), H100)
    assert late.rejected == {"misses the time for each further token": 1}
    crowd = search_serving(load("meta-llama-3.1-8b"), ServingSearchPlan(gpus=1, users=10_000), H100)
    assert crowd.rejected == {"too few sequences fit for the users": 1}


def test_a_gpu_and_a_size_are_needed():
    with pytest.raises(InputError, match="gpu: none is given"):
        search_serving(load("gpt2"), ServingSearchPlan(gpus=1))
    with pytest.raises(ValueError, match="or users"):
        ServingSearchPlan()
