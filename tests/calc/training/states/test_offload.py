"""Offloading against the ZeRO-Offload and ZeRO-Infinity papers: bytes a parameter on each side, and bytes moved in a step."""

from __future__ import annotations

import pytest

from calc.errors import InputError, validated
from calc.hardware import gpu
from calc.training import TrainingPlan, train
from calc.training.states.offload import offloaded
from calc.training.states.sharding import StateKey
from calc.training.states.tensors import Tensor, Tensors
from calc.units import GB
from tests.calc.training.models import model
from tests.latex import assert_formulas_hold

LLAMA_2_7B = 6_738_415_616
INFINITY = {"offload": "parameters", "zero": 3, "implementation": "fused"}


def away(elements: int, **values):
    """What one rank keeps away of a model that is one tensor."""
    plan = TrainingPlan(**values)
    tensor = Tensor(("weight",), 1, elements, 1, "<N>", "1", (("N", elements),), "weight")
    return offloaded(plan, ((Tensors((), (tensor,)), 1),), StateKey.of(plan))


def test_zero_offload_keeps_2_bytes_a_parameter_on_the_device_and_14_on_the_host_and_moves_4():
    answer = train(model("llama-2-7b"), TrainingPlan(seq=512, recipe="mixed-16", offload="optimizer"))
    assert (answer.parameters_bytes, answer.gradients_bytes, answer.optimizer_bytes) == (2 * LLAMA_2_7B, 0, 0)
    assert answer.offloaded.host_bytes == 14 * LLAMA_2_7B
    assert sum(answer.offloaded.traffic) == 4 * LLAMA_2_7B


def test_ranks_share_the_host_states_and_each_moves_its_own_part():
    plan = TrainingPlan(seq=512, recipe="mixed-16", offload="optimizer", zero=2, dp=8, implementation="fused")
    answer = train(model("llama-2-7b"), plan)
    assert answer.parameters_bytes == 2 * LLAMA_2_7B
    assert answer.offloaded.host_bytes == 14 * LLAMA_2_7B // 8
    assert sum(answer.offloaded.traffic) == 4 * LLAMA_2_7B // 8


def test_a_recipe_without_master_weights_has_its_weights_on_both_sides():
    answer = train(model("llama-2-7b"), TrainingPlan(seq=512, recipe="fp32", offload="optimizer"))
    assert answer.parameters_bytes == 4 * LLAMA_2_7B
    assert answer.offloaded.host_bytes == 16 * LLAMA_2_7B


def test_zero_infinity_keeps_16_bytes_a_parameter_away_and_no_state_on_the_device():
    plan = TrainingPlan(seq=512, recipe="mixed-16", offload="parameters", zero=3)
    answer = train(model("llama-2-7b"), plan)
    assert (answer.parameters_bytes, answer.gradients_bytes, answer.optimizer_bytes) == (0, 0, 0)
    assert answer.offloaded.host_bytes == 16 * LLAMA_2_7B
    on_nvme = train(model("llama-2-7b"), plan.model_copy(update={"nvme": True})).offloaded
    assert (on_nvme.host_bytes, on_nvme.nvme_bytes) == (0, 16 * LLAMA_2_7B)


# arXiv 2104.07857, figure 2a: layers, hidden size, terabytes (of 2 ** 40) of model states at 20 bytes a parameter
@pytest.mark.parametrize(
    ("layers", "hidden", "tebibytes"),
    [(80, 10240, 1.83), (100, 20480, 9.16), (128, 25600, 18.31), (195, 65536, 182.81), (315, 163840, 1845.70)],
)
def test_model_states_are_those_of_zero_infinitys_figure_2a(layers, hidden, tebibytes):
    found = away(12 * layers * hidden**2, recipe="megatron-fp16", nvme=True, **INFINITY)
    assert found.nvme_bytes == 240 * layers * hidden**2  # its equation 2
    assert round(found.nvme_bytes / 2**40, 2) == tebibytes


def test_a_step_moves_what_zero_infinitys_section_4_1_counts():
    """Weights three times with recomputation and gradients once, 2 · 4 bytes a parameter; optimizer states of 16 bytes in and out."""
    elements = 10**6
    moved = away(elements, recipe="mixed-16", recompute="full", **INFINITY).traffic
    assert moved.to_device + moved.to_host == 2 * 4 * elements
    states = away(elements, recipe="megatron-bf16", recompute="full", nvme=True, **INFINITY).traffic
    weights = 3 * 2 * elements + 2 * elements  # read in each pass, and written once updated
    assert states.nvme_read + states.nvme_written - weights == 2 * 16 * elements


def test_each_micro_batch_moves_its_gradients_and_loads_the_weights_again():
    one = away(1000, recipe="mixed-16", **INFINITY).traffic
    four = away(1000, recipe="mixed-16", global_batch=4, **INFINITY).traffic
    assert four == tuple(4 * value for value in one)


def test_thirteen_billion_parameters_train_on_one_v100_as_zero_offload_says():
    values = {"seq": 1024, "recipe": "mixed-16", "recompute": "full"}
    card = gpu("v100-sxm-32gb")
    assert not train(model("llama-2-13b"), TrainingPlan(**values), card).fits
    assert train(model("llama-2-13b"), TrainingPlan(offload="optimizer", **values), card).fits


def test_times_are_bytes_over_the_bandwidth_of_each_way():
    card = gpu("a100-sxm-80gb")
    plan = TrainingPlan(seq=512, recipe="mixed-16", offload="optimizer", zero=3, nvme=True, nvme_GBps=2)
    found = train(model("llama-2-7b"), plan, card).offloaded
    assert found.seconds(card) == 4 * LLAMA_2_7B / card.pcie_bandwidth
    assert found.seconds(None) is None
    assert found.nvme_seconds == (14 + 14) * LLAMA_2_7B / (2 * GB)


@pytest.mark.parametrize(
    "values",
    [
        {"offload": "optimizer"},
        {"offload": "optimizer", "global_batch": 2, "recompute": "full"},
        {"offload": "optimizer", "dp": 4, "zero": 3, "recipe": "fsdp-bf16"},
        {"offload": "parameters", "zero": 3, "recipe": "mixed-16", "nvme": True},
        {"offload": "parameters", "zero": 3, "dp": 8, "recipe": "fsdp-bf16", "reshard_after_forward": False},
        {"offload": "parameters", "zero": 3, "dp": 8, "implementation": "fused", "recipe": "megatron-bf16", "tp": 2},
    ],
)
@pytest.mark.parametrize("name", ["qwen3-0.6b", "mixtral-8x7b-v0.1"])
def test_leaves_sum_to_the_peak_and_every_formula_is_its_value(name, values):
    answer = train(model(name), TrainingPlan(seq=256, **values))
    assert answer.breakdown.total == answer.peak_bytes
    for found in (answer.breakdown, answer.offloaded.states, answer.offloaded.moved):
        assert_formulas_hold(found)
    plain = train(model(name), TrainingPlan(seq=256, **{**values, "offload": "none", "nvme": False}))
    assert answer.peak_bytes < plain.peak_bytes


def test_what_never_trains_is_not_updated_on_the_host():
    answer = train(model("gemma-3-4b-it"), TrainingPlan(seq=512, offload="optimizer"))
    trained = answer.gradients_bytes + sum(
        row.value for row in answer.offloaded.states.rows() if "/gradients/" in f"/{row.path}"
    )
    assert answer.offloaded.traffic.to_device == trained  # bf16 weights and gradients
    assert answer.parameters_bytes > answer.offloaded.traffic.to_device


def test_without_offload_nothing_is_away_and_nothing_moves():
    answer = train(model("llama-2-7b"), TrainingPlan(seq=512))
    found = answer.as_json()
    assert (found["host_bytes"], found["nvme_bytes"], found["transfer_seconds"]) == (0, 0, 0)
    assert set(found["transfer_bytes"].values()) == {0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nvme": True}, "nvme (True) needs offload 'optimizer' or 'parameters'"),
        ({"offload": "parameters"}, "offload: 'parameters' needs zero 3"),
        ({"offload": "optimizer", "dp": 2}, "over several ranks needs zero 2 or 3, and zero is 0"),
        ({"offload": "optimizer", "optimizer": "adamw-8bit"}, "optimizer 'adamw-8bit' on the device"),
        ({"offload": "optimizer", "method": "dora"}, "method is 'dora'"),
        ({"offload": "optimizer", "pp": 2, "global_batch": 4}, "pp 2"),
        ({"offload": "optimizer", "objective": "dpo"}, "objective 'dpo'"),
    ],
)
def test_what_offloading_does_not_cover_is_refused_with_its_values(values, message):
    with pytest.raises(InputError) as error:
        validated(TrainingPlan, values)
    assert message in str(error.value)
