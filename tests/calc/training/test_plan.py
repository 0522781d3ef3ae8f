"""The rules of a training plan: each refusal states the rule and the values."""

from __future__ import annotations

import pytest

from calc.errors import InputError, validated
from calc.training import TrainingPlan, train
from tests.calc.training.models import model


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"global_batch": 7, "micro_batch": 2}, "micro_batch * dp (2 * 1) must divide global_batch (7)"),
        ({"dp": 6, "dp_replicate": 4}, "dp_replicate (4) must divide dp (6)"),
        ({"dp": 6, "ep": 4}, "ep (4) must divide dp * cp / dp_replicate (6 * 1 / 1)"),
        ({"seq": 1000, "cp": 3}, "cp (3) must divide seq (1000)"),
        ({"sequence_parallel": True}, "sequence_parallel (True) needs tp above 1"),
        ({"recompute": "selective"}, "'selective' is not part of implementation 'hf'"),
        ({"implementation": "liger", "tp": 2}, "'liger' is modelled without tensor and expert parallelism: tp (2)"),
        ({"implementation": "liger", "loss": "chunked"}, "'chunked' is not part of implementation 'liger'"),
        ({"objective": "ppo"}, "objective: 'ppo' is not modelled yet"),
        ({"objective": "dpo", "loss": "full"}, "'dpo' is modelled with implementation 'hf' and loss 'chunked'"),
        ({"objective": "grpo", "zero": 3, "dp": 2}, "'grpo' is modelled on data-parallel ranks with zero at most 2"),
        ({"objective": "grpo", "recipe": "fp32"}, "'grpo' is modelled in pure-bf16 (dpo: fp32 too)"),
        ({"objective": "dpo", "prompt_tokens": 4096}, "prompt_tokens (4096) must be below seq (4096)"),
        ({"prompt_tokens": 128}, "prompt_tokens and reference need objective dpo or grpo, not 'pretrain'"),
        ({"virtual_stages": 2}, "virtual_stages (2) needs pp above 1"),
        ({"attention": "flash", "recipe": "fp32"}, "'flash' takes 16-bit numbers"),
        ({"implementation": "fused", "attention": "eager"}, "'eager' is not part of implementation 'fused'"),
        ({"method": "lora", "implementation": "fused"}, "'lora' needs implementation 'hf'"),
        ({"method": "lora", "tp": 2}, "tp (2) and ep (1) must be 1"),
        ({"lora_targets": "q_proj"}, "lora_targets needs method 'lora', 'dora' or 'qlora', not 'full'"),
        ({"seq": 0}, "seq"),
        ({"zero": 4}, "zero"),
        ({"recipe": "int3"}, "recipe"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_with_its_values(values, message):
    with pytest.raises(InputError) as error:
        validated(TrainingPlan, values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 3}, "tp (3) must divide num_attention_heads (32)"),
        ({"tp": 2, "seq": 511}, "cp * tp (1 * 2) must divide seq (511)"),
        ({"schedule": "interleaved", "pp": 4, "virtual_stages": 100, "global_batch": 8}, "pp * virtual_stages"),
        ({"method": "lora", "lora_targets": ("q_proj", "c_attn")}, "lora_targets: 'c_attn' is not allowed"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused_with_both_values(values, message):
    with pytest.raises(InputError) as error:
        train(model("llama-2-7b"), TrainingPlan(**values))
    assert message in str(error.value)


def test_adapters_need_names_where_peft_has_no_choice_of_its_own():
    with pytest.raises(InputError, match="names no linear layer of mamba-370m-hf"):
        train(model("mamba-370m-hf"), TrainingPlan(method="lora"))
    assert train(model("mamba-370m-hf"), TrainingPlan(method="lora", lora_targets=("x_proj",))).breakdown.total


def test_lora_targets_are_read_with_commas():
    assert validated(TrainingPlan, {"method": "lora", "lora_targets": "q_proj, v_proj"}).lora_targets == (
        "q_proj",
        "v_proj",
    )
