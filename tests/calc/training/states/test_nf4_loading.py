"""QLoRA against its paper, against what bitsandbytes stores of a weight, and against what loading Llama-2-7B takes."""

from __future__ import annotations

import pytest

from calc.errors import InputError, validated
from calc.hardware import gpu
from calc.model.config import from_config
from calc.parameters import lora_parameters
from calc.training import TrainingPlan, train
from calc.training.states.base_formats import BASE_FORMATS
from calc.units import GiB
from tests.calc.training.models import model
from tests.latex import assert_formulas_hold


def test_double_quantisation_takes_0_127_bits_a_weight_where_fp32_absmaxes_take_0_5():
    """arXiv 2305.14314, section 3: 8 / 64 + 32 / (64 · 256) = 0.127 bits, a saving of 0.373 bits."""
    weight, *constants = BASE_FORMATS["nf4"].stored
    bits = sum(8 * rule.bytes / rule.per for rule in constants)
    assert 8 * weight.bytes / weight.per == 4
    assert bits == 8 / 64 + 32 / (64 * 256)
    assert round(bits, 3) == 0.127
    assert round(32 / 64 - bits, 3) == 0.373


def test_llama_2_7b_takes_3_600_gib_once_loaded_and_4_089_once_prepared():
    found = train(model("llama-2-7b"), TrainingPlan(seq=512, method="qlora")).as_json()["load_bytes"]
    assert (round(found["loaded"] / GiB, 3), round(found["prepared"] / GiB, 3)) == (3.6, 4.089)
    assert found["peak"] == found["prepared"]  # more than the largest weight in 16 bits adds to what is loaded


def test_a_wide_layer_next_to_a_small_vocabulary_has_its_peak_while_it_loads():
    sizes = {"hidden_size": 64, "intermediate_size": 1024, "vocab_size": 100, "num_hidden_layers": 2}
    spec = from_config({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, **sizes}, "wide")
    found = train(spec, TrainingPlan(seq=64, method="qlora")).as_json()["load_bytes"]
    assert found["peak"] == found["loaded"] + 2 * 64 * 1024 > found["prepared"]  # the largest weight in 16 bits


@pytest.mark.parametrize(("recipe", "state"), [("pure-bf16", "loaded"), ("amp", "prepared")])
def test_the_recipe_says_in_what_the_rest_is_held(recipe, state):
    exact = train(model("llama-2-7b"), TrainingPlan(seq=512, method="qlora", recipe=recipe))
    adapters = lora_parameters(model("llama-2-7b"), 8)
    rounding = next(row.value for row in exact.breakdown.rows() if row.path == "parameters/rounding")
    assert exact.parameters_bytes == exact.as_json()["load_bytes"][state] + 4 * adapters + rounding
    assert exact.gradients_bytes == 4 * adapters


def test_seventy_billion_parameters_train_within_48_gigabytes():
    """Its abstract: 65 B parameters from over 780 GB of 16-bit training, 12 bytes each, to less than 48 GB."""
    plan = TrainingPlan(seq=512, method="qlora", lora_rank=16, recompute="full", optimizer="paged-adamw")
    answer = train(model("llama-2-70b"), plan, gpu("l40s-48gb"))
    assert answer.fits
    assert answer.driver_bytes < 48e9
    assert 12 * 65e9 == 780e9


def test_linear_layers_alone_are_quantised():
    rows = {row.path for row in train(model("qwen3-30b-a3b"), TrainingPlan(seq=256, **EXPERTS)).breakdown.rows()}
    assert {f"parameters/layers/attention/query/{part}" for part in ("weight", "absmax", "absmax_scale")} <= rows
    assert {"parameters/layers/experts/gate", "parameters/layers/router/router", "parameters/embedding/token"} <= rows


EXPERTS = {"method": "qlora", "lora_targets": ("q_proj", "v_proj")}


@pytest.mark.parametrize("recipe", ["pure-bf16", "amp"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("name", "values"),
    [("qwen3-0.6b", {}), ("gpt2", {}), ("phi-3-mini-4k-instruct", {}), ("qwen3-30b-a3b", EXPERTS)],
)
def test_leaves_sum_to_the_peak_and_every_formula_is_its_value(name, values, recipe, recompute):
    plan = TrainingPlan(**{"seq": 256, "method": "qlora", "recipe": recipe, "recompute": recompute, **values})
    answer = train(model(name), plan)
    assert answer.breakdown.total == answer.peak_bytes
    assert_formulas_hold(answer.breakdown)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("llama-2-7b", {"recipe": "fp32"}, "method: 'qlora' has recipe pure-bf16"),
        ("llama-2-7b", {"zero": 3, "dp": 2, "quantization": "gptq-int4"}, "zero (3) must be at most 2"),
        ("llama-2-7b", {"tp": 2}, "method: 'qlora' is modelled without tensor and expert parallelism"),
        ("mixtral-8x7b-v0.1", {}, "lora_targets: with 'all-linear' peft adapts the experts"),
        (
            "mamba-370m-hf",
            {"lora_targets": ("x_proj",)},
            "method: 'qlora' is not allowed; it is not modelled for the recurrent",
        ),
    ],
)
def test_what_qlora_does_not_cover_is_refused_with_its_values(name, values, message):
    with pytest.raises(InputError) as error:
        train(model(name), validated(TrainingPlan, {"method": "qlora", **values}))
    assert message in str(error.value)
