import numpy as np
import pytest

from calc.catalogue import load
from calc.hardware import gpu
from calc.serving import ServingPlan, serve
from calc.serving.speed.curves import memory_by_context, speed_by_users, users_and_prompts

MODEL, H100 = load("meta-llama-3.1-8b"), gpu("h100-sxm-80gb")
PLAN = ServingPlan(engine="vllm", prompt=1024, output=256, context=1280, weights="bf16", kv_dtype="bf16")


def test_a_point_of_the_curve_is_the_answer_to_its_plan():
    found = speed_by_users(MODEL, PLAN, H100, np.array([1.0, 16.0, 64.0]))
    for at, users in enumerate((1, 16, 64)):
        one = serve(MODEL, PLAN.model_copy(update={"concurrency": users}), H100).speed
        assert found.tpot[at] == pytest.approx(one.tpot_s)
        assert found.ttft[at] == pytest.approx(one.ttft_s)
        assert found.tokens_per_s[at] == pytest.approx(one.tokens_per_s)


def test_a_heat_map_has_a_value_everywhere_and_queues_beyond_the_memory():
    users, prompts = np.meshgrid(2.0 ** np.arange(12), 2.0 ** np.arange(6, 17))
    bounded = users_and_prompts(MODEL, PLAN, H100, users, prompts)
    free = users_and_prompts(MODEL, PLAN, H100, users, prompts, queueing=False)
    assert np.all(np.isfinite(bounded.tpot) & (bounded.tpot > 0) & (bounded.ttft > 0))
    assert bounded.queued[-1, -1] > 0
    assert np.all(free.queued[:, :10] == 0)  # up to 1,024 users, vLLM's most in one step
    assert np.all(np.diff(free.tpot[:, :10], axis=1) > 0)


def test_memory_by_context_is_the_answers_cache():
    plan = PLAN.model_copy(update={"concurrency": 3})
    found = memory_by_context(MODEL, plan, [1, 1280])
    assert found[1] == serve(MODEL, plan, H100).kv_bytes
    assert found[0] == 3 * 131_072
