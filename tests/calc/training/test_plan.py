"""The rules of a training plan: each refusal states the rule and the values."""

from __future__ import annotations

import pytest

from calc.errors import InputError, validated
from calc.model.config import from_config
from calc.parameters import lora_parameters
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
        ({"optimizer": "muon", "optimizer_kernel": "fused"}, "'fused' is not there for optimizer 'muon'"),
        ({"optimizer": "adafactor", "optimizer_kernel": "fused"}, "'fused' is not there for optimizer 'adafactor'"),
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


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3-30b-a3b", "gate_proj,up_proj,down_proj"),
        ("qwen3-30b-a3b", "q_proj,down_proj"),
        ("mixtral-8x7b-v0.1", "w1,w3,w2"),
        ("mixtral-8x7b-v0.1", "gate"),
        ("deepseek-v3", "down_proj"),  # peft takes the stacked experts by this name, and the ledger the dense layers
    ],
)
def test_adapters_on_stacked_experts_are_refused_not_dropped(name, targets):
    with pytest.raises(InputError, match="is not modelled; name attention modules such as q_proj,v_proj"):
        train(model(name), validated(TrainingPlan, {"method": "lora", "lora_targets": targets}))


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3-30b-a3b", "q_proj,v_proj"),
        ("deepseek-v3", "kv_a_proj_with_mqa"),
        ("gpt-oss-20b", "q_proj,k_proj"),
        ("llama-2-7b", "gate_proj,up_proj,down_proj"),
    ],
)
def test_the_adapters_that_train_are_those_that_the_model_counts(name, targets):
    plan = validated(TrainingPlan, {"method": "lora", "lora_targets": targets, "seq": 128, "optimizer": "sgd"})
    assert train(model(name), plan).gradients_bytes == 4 * lora_parameters(model(name), 8, targets)


def test_all_linear_stands_alone():
    with pytest.raises(InputError, match="'all-linear' stands alone"):
        train(model("llama-2-7b"), TrainingPlan(method="lora", lora_targets=("all-linear", "q_proj")))


@pytest.mark.parametrize("targets", [(), ("all-linear",), ("q_proj", "v_proj")])
def test_a_model_whose_training_is_not_modelled_is_told_so_before_its_targets(targets):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 16, "vocab_size": 100}
    experts = {"num_experts_per_tok": 2, "num_local_experts": 4, "intermediate_size": 32}
    spec = from_config({"architectures": ["JetMoeForCausalLM"], **sizes, **experts}, "jetmoe")
    with pytest.raises(InputError, match="their training is not modelled"):
        train(spec, TrainingPlan(method="lora", lora_targets=targets))


def test_lora_targets_are_read_with_commas():
    assert validated(TrainingPlan, {"method": "lora", "lora_targets": "q_proj, v_proj"}).lora_targets == (
        "q_proj",
        "v_proj",
    )
