"""Preference and reinforcement learning in their answers: what each phase holds, and which plans are refused."""

from __future__ import annotations

import pytest

from calc.errors import InputError
from calc.training import TrainingPlan, train
from tests.calc.training.models import model
from tests.latex import assert_formulas_hold


def answer(name="llama-3.2-1b", **values):
    return train(model(name), TrainingPlan(**{"seq": 1024, "prompt_tokens": 256, **values}))


@pytest.mark.parametrize(
    "values",
    [
        {"objective": "dpo"},
        {"objective": "dpo", "recompute": "full", "micro_batch": 3},
        {"objective": "dpo", "method": "lora"},
        {"objective": "dpo", "recipe": "fp32", "dp": 4, "zero": 2},
        {"objective": "grpo", "micro_batch": 4},
        {"objective": "grpo", "micro_batch": 2, "global_batch": 512, "reference": True, "recompute": "full"},
        {"objective": "grpo", "micro_batch": 1, "global_batch": 4096, "seq": 8192, "recompute": "full"},
        {"objective": "grpo", "micro_batch": 512, "seq": 32, "prompt_tokens": 31, "recompute": "full"},
    ],
    ids=str,
)
def test_leaves_sum_to_the_peak_and_follow_their_formulas(values):
    found = answer(**values)
    assert found.breakdown.total == found.peak_bytes == max(found.phases.values())
    assert_formulas_hold(found.breakdown)


@pytest.mark.parametrize("objective", ["dpo", "grpo"])
@pytest.mark.parametrize("name", ["clip-vit-large-patch14", "snowflake-arctic-embed-m", "t5-v1_1-xxl"])
def test_what_has_an_encoder_is_trained_by_no_preference_and_no_reward(name, objective):
    with pytest.raises(InputError, match=f"objective: '{objective}' is not allowed; it is modelled for decoders alone"):
        answer(name, objective=objective)


@pytest.mark.parametrize("name", ["clip-vit-large-patch14", "snowflake-arctic-embed-m"])
def test_a_model_without_a_head_is_not_said_to_have_labels(name):
    notes = train(model(name), TrainingPlan(seq=64)).assumptions
    assert not any("labels are the inputs" in line for line in notes)
    assert any("no head and no labels" in line for line in notes)


def test_dpo_holds_the_reference_next_to_the_policy_and_sees_both_answers():
    with_reference, without = answer(objective="dpo"), answer(objective="dpo", reference=False)
    assert with_reference.parameters_bytes == 2 * without.parameters_bytes
    assert with_reference.optimizer_bytes == without.optimizer_bytes
    assert with_reference.worst.plan.sequences == 2
    paths = [row.path for row in with_reference.breakdown.rows()]
    assert any(path.startswith("parameters/reference/layers") for path in paths)


def test_with_adapters_the_reference_is_the_base_model_and_no_second_copy():
    adapted = answer(objective="dpo", method="lora")
    assert adapted.parameters_bytes == answer(method="lora", prompt_tokens=1).parameters_bytes
    assert adapted.worst.segments[-1].path[0] == "reference"  # it runs all the same


def test_grpo_generates_the_completions_of_a_whole_optimizer_step():
    few, many = (answer(objective="grpo", global_batch=batch) for batch in (8, 800))
    assert {"rollout", "forward", "backward", "step"} == set(few.phases)
    cache = 2 * 16 * 2 * 8 * 64 * 1023  # bytes of a sequence before its last token: 16 layers of 8 heads of 64
    assert many.phases["rollout"] - few.phases["rollout"] >= 792 * cache
    assert many.phases["backward"] == few.phases["backward"]
    assert many.peak_phase == "rollout"


def test_grpo_has_a_reference_where_it_is_asked_for():
    assert "reference" not in answer(objective="grpo").phases
    both = answer(objective="grpo", reference=True)
    assert both.phases["reference"] < both.phases["forward"]
    assert both.parameters_bytes == 2 * answer(objective="grpo").parameters_bytes


@pytest.mark.parametrize("name", ["gemma-2-2b", "deepseek-v3", "gpt-oss-20b", "mamba-370m-hf"])
def test_a_rollout_that_is_not_modelled_is_refused_by_name(name):
    with pytest.raises(InputError, match="its rollout is modelled for keys and values of the whole sequence"):
        answer(name, objective="grpo", seq=8192)


def test_the_answer_says_what_it_takes_for_granted():
    notes = " ".join(answer(objective="grpo", global_batch=64).assumptions)
    assert "generates all 64 completions" in notes
    assert "num_generations" in notes
    assert "has the policy's number format" in " ".join(answer(objective="dpo").assumptions)
