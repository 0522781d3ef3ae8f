"""Weights by format: exact bits, what stays wide, and how tensor and pipeline parallelism divide them."""

from __future__ import annotations

import pytest

from calc.catalogue import load
from calc.parameters import parameters
from calc.serving import ServingPlan, serve
from calc.serving.formats import GGML, weight_format
from calc.serving.gguf import fitting
from calc.serving.stages import stage_layers

BITS = [
    ("gptq-int4", 4.156),
    ("awq-int4", 4.156),
    ("mxfp4", 4.25),
    ("nvfp4", 4.5),
    ("fp8", 8.002),
    ("nf4", 4.127),
]


@pytest.mark.parametrize(("name", "bits"), BITS)
def test_bits_of_a_quantised_weight(name, bits):
    side = 2**14
    scheme = weight_format(load("llama-2-7b"), name).quantization.scheme
    total = sum(tensor.bits * tensor.cells(side, side) for tensor in scheme.tensors)
    assert round(total / side**2, 3) == bits


@pytest.mark.parametrize(
    ("name", "bits"), [("Q8_0", 8.5), ("Q4_0", 4.5), ("Q4_K", 4.5), ("Q5_K", 5.5), ("Q6_K", 6.5625), ("Q2_K", 2.625)]
)
def test_bits_of_a_ggml_block(name, bits):
    assert GGML[name].value == bits


@pytest.mark.parametrize("model", ["llama-2-7b", "mixtral-8x7b-v0.1", "deepseek-v3", "gpt2"])
@pytest.mark.parametrize(("name", "size"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
def test_plain_weights_are_parameters_times_bytes(model, name, size):
    spec = load(model)
    assert serve(spec, ServingPlan(weights=name)).weights_bytes == size * parameters(spec).total


def test_gptq_keeps_embedding_head_and_norms_at_16_bits():
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    wide = parameters(load("llama-2-7b")).total - linear
    assert serve(load("llama-2-7b"), ServingPlan(weights="gptq-int4")).weights_bytes == linear * 133 // 256 + 2 * wide


def test_int8_adds_one_scale_a_row():
    rows = 32 * (4 * 4096 + 2 * 11008 + 4096)
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    wide = parameters(load("llama-2-7b")).total - linear
    assert serve(load("llama-2-7b"), ServingPlan(weights="int8")).weights_bytes == linear + 4 * rows + 2 * wide


def test_mxfp4_is_on_the_experts_alone():
    spec = load("gpt-oss-120b")
    experts = 36 * 128 * 3 * 2880 * 2880
    rest = parameters(spec).total - experts
    assert serve(spec, ServingPlan(weights="mxfp4")).weights_bytes == experts * 17 // 32 + 2 * rest


def test_tensor_parallelism_copies_norms_and_the_router():
    spec = load("qwen3-30b-a3b")
    whole, half = (serve(spec, ServingPlan(tp=tp)).weights_bytes for tp in (1, 2))
    copied = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048  # norms of the layer and of the heads, router; final norm
    assert 2 * half - whole == 2 * copied


def test_a_rank_holds_at_least_one_kv_head():
    spec = load("qwen3-30b-a3b")  # 4 KV heads
    rows = {row.path: row.value for row in serve(spec, ServingPlan(tp=16)).breakdown.rows()}
    assert rows["serving/weights/layers/attention/key"] == 48 * 2 * 128 * 2048
    assert rows["serving/weights/layers/attention/query"] == 48 * 2 * 2 * 128 * 2048


def test_stages_hold_all_layers_once():
    for layers, stages in [(32, 1), (32, 3), (61, 8), (5, 5), (80, 7)]:
        found = stage_layers(layers, stages)
        assert [layer for stage in found for layer in stage] == list(range(layers))
        assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(("model", "copied"), [("llama-2-7b", 0), ("gpt2", 50257 * 768)])
def test_stages_sum_to_the_model_and_a_tied_head_is_held_twice(model, copied):
    from calc.serving.weights import stored_weights

    spec = load(model)
    stored = stored_weights(spec, "bf16", 1)
    stages = stage_layers(spec.num_hidden_layers, 3)
    assert sum(stored.stage_bytes(stage, 3) for stage in stages) == 2 * (parameters(spec).total + copied)


def test_a_type_whose_blocks_do_not_divide_a_row_falls_back():
    assert fitting("Q4_K", 4096) == "Q4_K"
    assert fitting("Q4_K", 2880) == "Q5_0"
    assert fitting("Q6_K", 2880) == "Q8_0"
    assert fitting("Q4_0", 100) == "F16"
