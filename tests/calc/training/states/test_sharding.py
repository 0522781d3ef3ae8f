"""Training states against the ZeRO paper, Megatron-LM's table and bitsandbytes' block layout."""

from __future__ import annotations

import pytest

from calc.errors import InputError
from calc.training import TrainingPlan, train
from calc.training.states.recipes import OPTIMIZERS, RECIPES
from calc.training.states.sharding import StateKey, group_bytes, rules
from calc.training.states.tensors import Tensor, Tensors
from tests.calc.training.models import model

LLAMA_2_7B = 6_738_415_616


def states(plan: TrainingPlan, elements: int = 7_500_000_000, expert: bool = False) -> int:
    """Bytes of one tensor's states under a plan."""
    tensor = Tensor(("weight",), 1, elements, 1, "<N>", "1", (("N", elements),), "weight", expert=expert)
    return sum(group_bytes(Tensors((), (tensor,)), StateKey.of(plan)).rounded)


@pytest.mark.parametrize(
    ("recipe", "bytes_per_parameter"),
    [
        ("fp32", 16),
        ("amp", 16),
        ("mixed-16", 16),
        ("megatron-bf16", 18),
        ("megatron-fp16", 20),
        ("fsdp-bf16", 16),
        ("pure-bf16", 8),
        ("fp8", 20),
    ],
)
def test_each_recipe_keeps_its_bytes_per_parameter(recipe, bytes_per_parameter):
    assert sum(rule.bytes for rule in rules(recipe, "adamw")) == bytes_per_parameter
    answer = train(model("llama-2-7b"), TrainingPlan(seq=512, recipe=recipe))
    found = answer.parameters_bytes + answer.gradients_bytes + answer.optimizer_bytes
    assert found == bytes_per_parameter * LLAMA_2_7B


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_model_states_match_figure_1_of_the_paper(stage, gigabytes):
    plan = TrainingPlan(recipe="mixed-16", zero=stage, dp=64)
    assert round(states(plan) / 1e9, 1) == gigabytes


@pytest.mark.parametrize(
    ("recipe", "fixed", "divided"), [("megatron-bf16", 6, 12), ("megatron-fp16", 4, 16), ("fp32", 8, 8)]
)
def test_megatrons_distributed_optimizer_divides_what_its_documentation_says(recipe, fixed, divided):
    plan = TrainingPlan(recipe=recipe, zero=1, dp=4, cp=2, implementation="fused")
    elements = 8 * 10**6
    assert states(plan, elements) == fixed * elements + divided * elements // 8


def test_experts_shard_over_the_expert_data_parallel_group():
    plan = TrainingPlan(recipe="mixed-16", zero=3, dp=64, ep=8, implementation="fused")
    elements = 64 * 10**6
    assert states(plan, elements) == 16 * elements // 64
    assert states(plan, elements, expert=True) == 16 * elements // 8


def test_llama_2_7b_at_20_bytes_is_about_140_gigabytes_and_its_weights_are_14():
    answer = train(model("llama-2-7b"), TrainingPlan(seq=512, recipe="megatron-fp16"))
    assert answer.parameters_bytes == 2 * LLAMA_2_7B
    total = answer.parameters_bytes + answer.gradients_bytes + answer.optimizer_bytes
    assert total == 134_768_312_320
    assert 20 * 7_000_000_000 == 140 * 10**9  # the round figure


def test_optimizer_state_is_three_quarters_of_16_bytes():
    ledger = rules("mixed-16", "adamw")
    assert sum(rule.bytes for rule in ledger if rule.group == "optimizer") / 16 == 0.75


def test_8_bit_moments_count_a_scale_for_each_256_and_spare_small_tensors():
    plan = TrainingPlan(recipe="pure-bf16", optimizer="adamw-8bit", implementation="fused")
    elements = 4096 * 256
    assert states(plan, elements) == 4 * elements + 2 * (elements + 4 * elements // 256)
    assert states(plan, 4095) == (4 + 8) * 4095
    assert (OPTIMIZERS["adamw-8bit"].block, OPTIMIZERS["adamw-8bit"].smallest) == (256, 4096)


def test_4_bit_moments_are_torchaos():
    """Bytes of codes, scales and table of torchao.optim.subclass_4bit.OptimState4bit.zeros (0.12.0) of these shapes."""
    plan = TrainingPlan(recipe="pure-bf16", optimizer="adamw-4bit", implementation="fused")
    for elements, moment in ((4096 * 4096, 8_912_960), (11008 * 4096, 23_953_472), (4096, 2_240)):
        assert states(plan, elements) == 4 * elements + 2 * moment
    assert states(plan, 4095) == (4 + 4) * 4095  # small tensors keep moments like themselves
    assert states(plan, 4097) == (4 + 4) * 4097  # and those that blocks do not divide


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix():
    tensor = Tensor(("w",), 1, 4096, 1024, "<a>", "<b>", (("a", 4096), ("b", 1024)), "w")
    key = StateKey.of(TrainingPlan(recipe="fp32", optimizer="adafactor", implementation="fused"))
    assert group_bytes(Tensors((), (tensor,)), key).optimizer == 4 * (4096 + 1024)


def test_muon_keeps_one_moment_of_hidden_matrices_and_two_of_the_rest():
    spec = model("llama-2-7b")
    answer = train(spec, TrainingPlan(seq=512, optimizer="muon", recipe="fp32"))
    rest = 2 * 131_072_000 + 65 * 4096
    assert answer.optimizer_bytes == 4 * (LLAMA_2_7B + rest)


@pytest.mark.parametrize(("optimizer", "bytes_per_parameter"), [("sgd", 0), ("momentum", 2), ("lion", 2), ("adamw", 4)])
def test_plain_optimizers_keep_their_moments(optimizer, bytes_per_parameter):
    answer = train(model("llama-2-7b"), TrainingPlan(seq=512, optimizer=optimizer))
    assert answer.optimizer_bytes == bytes_per_parameter * LLAMA_2_7B


# the loop's names are still bound to what the final norm, just before the head, needed
@pytest.mark.parametrize(
    ("kernel", "copies"), [("foreach", LLAMA_2_7B), ("loop", 2 * 32000 * 4096 + 4096), ("fused", 0)]
)
def test_the_step_of_adamw_holds_what_its_kernel_copies(kernel, copies):
    answer = train(model("llama-2-7b"), TrainingPlan(seq=512, optimizer_kernel=kernel))
    assert answer.worst.step_bytes == 2 * copies


def test_kv_heads_are_copied_where_there_are_fewer_than_ranks():
    spec = model("meta-llama-3-8b")  # 8 KV heads of 128
    by_degree = {tp: train(spec, TrainingPlan(seq=512, tp=tp)).breakdown for tp in (8, 16, 32)}
    keys = {
        tp: next(row.value for row in found.rows() if row.path == "parameters/layers/attention/key")
        for tp, found in by_degree.items()
    }
    assert keys == {8: 32 * 2 * 128 * 4096, 16: 32 * 2 * 128 * 4096, 32: 32 * 2 * 128 * 4096}


def test_tensor_parallelism_divides_matrices_and_copies_norms():
    one = train(model("llama-2-7b"), TrainingPlan(seq=512)).parameters_bytes
    four = train(model("llama-2-7b"), TrainingPlan(seq=512, tp=4)).parameters_bytes
    norms = 2 * 65 * 4096
    assert four == (one - norms) // 4 + norms


def test_lora_freezes_the_model_and_keeps_fp32_adapters():
    answer = train(model("llama-2-7b"), TrainingPlan(seq=512, method="lora"))
    adapters = 32 * 2 * 8 * (4096 + 4096)
    assert answer.parameters_bytes == 2 * LLAMA_2_7B + 4 * adapters
    assert answer.gradients_bytes == 4 * adapters
    assert answer.optimizer_bytes == 8 * adapters


def test_dora_adds_a_length_for_each_output_of_an_adapted_layer():
    lora, dora = (train(model("llama-2-7b"), TrainingPlan(seq=512, method=method)) for method in ("lora", "dora"))
    lengths = 32 * 2 * 4096  # q_proj and v_proj
    assert dora.gradients_bytes - lora.gradients_bytes == 4 * lengths
    assert dora.optimizer_bytes - lora.optimizer_bytes == 8 * lengths
    assert dora.parameters_bytes - lora.parameters_bytes == 4 * lengths


def test_every_recipe_and_optimizer_states_its_source():
    for ledger in (*RECIPES.values(), *OPTIMIZERS.values()):
        assert ledger.source
        assert ledger.url.startswith("https://")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 3}, "tp (3) must divide num_attention_heads (32)"),
        ({"pp": 40}, "pp * virtual_stages (40 * 1) must be at most num_hidden_layers (32)"),
        ({"dp": 2, "ep": 2}, "has no experts"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_with_both_values(values, message):
    with pytest.raises(InputError) as error:
        train(model("llama-2-7b"), TrainingPlan(seq=512, **values))
    assert message in str(error.value)
