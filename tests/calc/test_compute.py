"""FLOPs, time, cost and energy against published figures."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calc.catalogue import catalogue, load
from calc.compute import ComputePlan, compute
from calc.errors import InputError, validated
from calc.flops import token_flops
from calc.hardware import custom_gpu, gpu
from calc.model.config import from_config
from calc.parameters import parameters
from tests.latex import assert_formulas_hold
from tests.offenders import each

A100 = gpu("a100-sxm-80gb")

# model, sequence, TFLOP of one training sequence: causal, with PaLM's convention, by 6ND
GOLDEN = [
    ("llama-2-7b", 4096, 175.57, 188.76, 165.60),
    ("meta-llama-3-70b", 8192, 3680.03, 3943.91, 3467.86),
    ("mixtral-8x7b-v0.1", 4096, 326.50, 339.70, 316.54),
]


@pytest.mark.parametrize(("model", "seq", "causal", "full", "six_nd"), GOLDEN)
def test_one_sequence_costs_what_the_three_conventions_say(model, seq, causal, full, six_nd):
    answer = compute(load(model), ComputePlan(seq=seq))
    assert round(answer.causal.training_flops / 1e12, 2) == causal
    assert round(answer.full.training_flops / 1e12, 2) == full
    assert round(answer.causal.six_nd_flops / 1e12, 2) == six_nd


@each(catalogue())
def test_active_parameters_are_those_of_params_or_a_note_says_why_not(name):
    spec = load(name)
    answer = compute(spec, ComputePlan(seq=64))
    differ = answer.active_parameters != parameters(spec).active
    assert any("params counts these as active too" in note for note in answer.notes) is differ


def test_llama_2_7b_to_the_last_flop():
    h, f, layers, vocab, s = 4096, 11008, 32, 32000, 4096
    matmul = layers * (4 * h * h + 3 * h * f) + vocab * h
    answer = compute(load("llama-2-7b"), ComputePlan(seq=s))
    assert answer.causal.forward_flops_per_token == 2 * matmul + layers * 2 * s * h
    assert answer.full.forward_flops_per_token == 2 * matmul + layers * 4 * s * h
    assert answer.causal.attention_flops_per_token == layers * 2 * s * h
    assert answer.causal.training_flops == 3 * s * answer.causal.forward_flops_per_token


def gpt3():
    """GPT-3 175B (arXiv 2005.14165, table 2.1): 96 layers of 12,288 with 96 heads, 2,048 positions."""
    return from_config(
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048}
        | {"vocab_size": 50257, "activation_function": "gelu_new", "tie_word_embeddings": True}
    )


def test_gpt_3_takes_3_14e23_flops():
    answer = compute(gpt3(), ComputePlan(seq=2048, tokens=300 * 10**9))
    assert answer.active_parameters == 174_604_259_328  # table D.1 says 174,600 million
    assert round(answer.causal.six_nd_flops / 1e23, 2) == 3.14  # the paper's table D.1


@pytest.mark.parametrize(("model", "hours", "percent"), [("llama-2-7b", 184_320, 39), ("llama-2-70b", 1_720_320, 43)])
def test_llama_2_gpu_hours_are_its_mfu_by_6nd(model, hours, percent):
    spec = load(model) if model in catalogue() else llama_2_70b()
    answer = compute(spec, ComputePlan(tokens=2 * 10**12, gpus=1024, gpu_hours=hours), A100)
    assert round(100 * answer.six_nd_mfu) == percent
    assert answer.causal.gpu_hours == pytest.approx(hours, rel=1e-12)
    assert answer.six_nd_mfu < answer.causal.mfu < answer.full.mfu


def llama_2_70b():
    return from_config(
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 32000}
        | {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False}
    )


@pytest.mark.parametrize(("hours", "mwh", "tonnes"), [(82_432, 36, 14), (135_168, 59, 23), (1_022_362, 449, 173)])
def test_energy_and_carbon_are_those_of_the_llama_paper(hours, mwh, tonnes):
    """LLaMA, arXiv 2302.13971, table 15: 400 W, PUE 1.1, 0.385 kg for a kWh; its MWh are cut, not rounded."""
    answer = compute(load("llama-2-7b"), ComputePlan(gpu_hours=hours), A100).causal
    assert int(answer.energy_kwh / 1000) == mwh
    assert abs(answer.carbon_kg / 1000 - tonnes) <= 0.5


def test_a_gpu_that_draws_a_share_of_its_board_power_takes_that_share_of_the_energy():
    plan = ComputePlan(gpu_hours=1000, power_utilization=0.6, pue=1.1)
    assert compute(load("llama-2-7b"), plan, A100).causal.energy_kwh == pytest.approx(
        240 * 1.1, rel=1e-12
    )  # 240 W of 400


def test_time_is_flops_over_gpus_peak_and_mfu():
    plan = ComputePlan(tokens=10**12, gpus=256, mfu=0.4, price_per_gpu_hour=2.0, recompute="full")
    answer = compute(load("llama-2-7b"), plan, A100).causal
    assert answer.seconds == pytest.approx(answer.training_flops / (256 * 312e12 * 0.4), rel=1e-12)
    assert answer.gpu_hours == pytest.approx(256 * answer.seconds / 3600, rel=1e-12)
    assert answer.cost == pytest.approx(2 * answer.gpu_hours, rel=1e-12)
    assert answer.mfu == 0.4
    assert answer.hfu == pytest.approx(0.4 * answer.hardware_flops / answer.training_flops, rel=1e-12)


def test_mfu_leaves_recomputation_out_and_hfu_counts_it():
    spec = load("llama-2-7b")
    none, selective, full = (
        compute(spec, ComputePlan(recompute=each)).causal for each in ("none", "selective", "full")
    )
    assert none.training_flops == selective.training_flops == full.training_flops == none.hardware_flops
    assert selective.hardware_flops - none.hardware_flops == 4096 * none.attention_flops_per_token
    layers = none.forward_flops_per_token - 2 * 32000 * 4096  # the head is not recomputed
    assert full.hardware_flops - none.hardware_flops == 4096 * layers


def test_without_a_gpu_or_a_peak_there_is_no_time_and_a_note_says_why():
    alone = compute(load("llama-2-7b"), ComputePlan())
    assert (alone.causal.seconds, alone.causal.cost, alone.causal.energy_kwh) == (None, None, None)
    assert "no GPU" in alone.notes[0]
    no_fp8 = compute(load("llama-2-7b"), ComputePlan(dtype="fp8"), A100)
    assert no_fp8.causal.seconds is None
    assert "fp8 needs compute capability 8.9" in no_fp8.notes[0]
    unpowered = compute(load("llama-2-7b"), ComputePlan(), custom_gpu(tflops=100.0))
    assert unpowered.causal.seconds > 0
    assert unpowered.causal.energy_kwh is None


def test_a_window_counts_the_band_it_leaves():
    spec = load("mistral-7b-v0.3")
    windowed = from_config(
        {"architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32768}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 1024}
        | {"head_dim": 128, "tie_word_embeddings": False}
    )
    s, w, a_d = 8192, 1024, 32 * 128
    attention = compute(windowed, ComputePlan(seq=s)).causal.attention_flops_per_token
    assert attention * s == 32 * 4 * a_d * (s * w - w * w // 2)  # the band below the diagonal, the diagonal by half
    assert compute(windowed, ComputePlan(seq=s)).full.attention_flops_per_token == 32 * 4 * a_d * w
    short = ComputePlan(seq=1024)
    assert compute(windowed, short).causal.training_flops == compute(spec, short).causal.training_flops


@each(catalogue())
def test_leaves_sum_to_training_flops_and_formulas_hold(model):
    answer = compute(load(model), ComputePlan(seq=1000, tokens=12_345))
    for figures in (answer.causal, answer.full):
        rows = figures.breakdown.rows()
        assert sum(row.value for row in rows) == figures.training_flops == 12_345 * figures.training_flops_per_token
        assert len({row.path for row in rows}) == len(rows)
        assert figures.training_flops_per_token == 3 * figures.forward_flops_per_token
        assert_formulas_hold(figures.breakdown)
    assert answer.causal.training_flops <= answer.full.training_flops


def test_the_top_level_is_the_causal_convention():
    shown = json.loads(json.dumps(compute(load("gpt-oss-120b"), ComputePlan(), A100).as_json()))
    assert {key: shown[key] for key in shown["causal"]} == shown["causal"]
    assert set(shown["full"]) == set(shown["causal"])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100_000), st.sampled_from(["llama-2-7b", "gemma-2-27b", "deepseek-v3", "qwen3.5-122b-a10b"]))
def test_a_longer_sequence_never_costs_less_a_token(seq, model):
    spec = load(model)
    for causal in (True, False):
        assert token_flops(spec, seq, causal).forward <= token_flops(spec, seq + 1, causal).forward


@pytest.mark.parametrize("field", ["seq", "tokens", "gpus", "mfu", "pue"])
def test_bounds_hold(field):
    with pytest.raises(InputError, match=field):
        validated(ComputePlan, {field: -1})


@pytest.mark.parametrize(("text", "tokens"), [("2e12", 2 * 10**12), ("1.5E9", 1_500_000_000), ("15000", 15_000)])
def test_tokens_may_be_written_short(text: str, tokens: int):
    assert validated(ComputePlan, {"tokens": text}).tokens == tokens


@pytest.mark.parametrize("text", ["2e12x", "1e400", "1e-1", "2.5", "nan", "e", "1e999999999999"])
def test_tokens_that_are_no_whole_number_are_refused_in_plain_words(text: str):
    with pytest.raises(InputError, match=r"^tokens: .* is not allowed; it must be a whole number$"):
        validated(ComputePlan, {"tokens": text})
