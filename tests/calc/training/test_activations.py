"""Activations against traced programs (transformers 5.24), Megatron's form and the worked examples of arXiv 2205.05198."""

from __future__ import annotations

import pytest

from calc.training import TrainingPlan, train
from calc.training.published_counts import zero_paper_activations
from calc.units import GiB
from tests.calc.training.models import gpt3, model


def layer_bytes(spec, plan, index=1):
    """What one layer (not the first) keeps for backward."""
    layers = [segment for segment in train(spec, plan).worst.segments if segment.path[0] == "layers"]
    return layers[index].bytes.kept


@pytest.mark.parametrize(
    ("name", "times_sbh"),
    [
        ("llama-2-7b", 45.5),
        ("meta-llama-3-8b", 49.0),
        ("meta-llama-3-70b", 48.5),
        ("qwen3-8b", 52.6),
        ("qwen3-0.6b", 70.2),
        ("mixtral-8x7b-v0.1", 85.06),
        ("qwen3-30b-a3b", 95.0),
        ("olmo-2-1124-7b", 65.5),
    ],
)
def test_a_layer_in_16_bits_keeps_what_the_traced_program_keeps(name, times_sbh):
    spec = model(name)
    found = layer_bytes(spec, TrainingPlan(seq=4096)) / (4096 * spec.hidden_size)
    assert found == pytest.approx(times_sbh, abs=0.05 if times_sbh != 85.06 else 0.005)


def test_phi_3_keeps_its_whole_fused_projection_and_a_mask_beyond_its_window():
    spec = model("phi-3-mini-4k-instruct")
    flash = layer_bytes(spec, TrainingPlan(seq=1024)) / (1024 * spec.hidden_size)
    masked = layer_bytes(spec, TrainingPlan(seq=4096)) / (4096 * spec.hidden_size)
    assert round(flash, 1) == 51.4  # 45.3 by the plain form, 4 for the projection held whole, 2 for the output's copy
    assert round(masked, 1) == 52.0  # no copy, but 2 s b bytes of mask for each token


@pytest.mark.parametrize(
    ("name", "plan", "times_sbh"),
    [
        ("llama-2-7b", {"recipe": "amp"}, 79.7),
        ("meta-llama-3-8b", {"recipe": "amp"}, 85.0),
        ("llama-2-7b", {"recipe": "fp32"}, 83.0),
        ("llama-2-7b", {"attention": "eager"}, 237.5),
        ("llama-2-7b", {"method": "lora"}, 40.2),
        ("llama-2-7b", {"method": "lora", "lora_targets": ("all-linear",)}, 67.0),
    ],
)
def test_precision_attention_and_adapters_change_what_a_layer_keeps(name, plan, times_sbh):
    spec = model(name)
    found = layer_bytes(spec, TrainingPlan(seq=4096, **plan)) / (4096 * spec.hidden_size)
    assert round(found, 1) == times_sbh


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_fused_layer_follows_the_closed_form(sequence_parallel):
    spec, s, t = model("meta-llama-3-8b"), 4096, 4
    h, a, k, d, f = 4096, 32, 8, 128, 14336
    plan = TrainingPlan(seq=s, tp=t, sequence_parallel=sequence_parallel, implementation="fused")
    between = 8 * h // t if sequence_parallel else 8 * h
    assert layer_bytes(spec, plan) == s * (between + (4 * a * d + 4 * k * d + 6 * f) // t)


def test_the_fused_mixture_follows_the_closed_form_and_is_never_divided_by_ep():
    spec, s = model("mixtral-8x7b-v0.1"), 4096
    h, a, k, d, f, chosen = 4096, 32, 8, 128, 14336, 2
    form = s * (8 * h + 4 * a * d + 4 * k * d + 4 * chosen * h + 6 * chosen * f)
    assert layer_bytes(spec, TrainingPlan(seq=s, implementation="fused")) == form
    assert layer_bytes(spec, TrainingPlan(seq=s, implementation="fused", dp=8, ep=8)) == form


def paper_layers(**changes) -> float:
    """GiB of the layers of stage 0: GPT-3 175B at TP 8, PP 8, s 2048, b 1."""
    plan = TrainingPlan(
        seq=2048, tp=8, pp=8, implementation="paper", recipe="megatron-fp16", global_batch=64, **changes
    )
    stage = train(gpt3(), plan).stages[0]
    kept = sum(segment.bytes.kept for segment in stage.segments if segment.path[0] == "layers")
    return kept * stage.stage.chunks / stage.stage.virtual / GiB


@pytest.mark.parametrize(
    ("changes", "gibibytes"),
    [
        ({"sequence_parallel": False}, 51.75),
        ({"recompute": "selective"}, 9.5625),
        ({"recompute": "full"}, 4.5),
        ({"sequence_parallel": False, "schedule": "interleaved", "virtual_stages": 3}, 66.84375),
        ({"recompute": "selective", "schedule": "interleaved", "virtual_stages": 3}, 12.3515625),
    ],
)
def test_gpt_3_on_stage_0_matches_the_papers_equations(changes, gibibytes):
    assert paper_layers(**changes) == gibibytes


def test_gpt_2_activations_are_60_gigabytes_by_the_zero_papers_count():
    assert round(zero_paper_activations(batch=32, seq=1024, hidden_size=1600, layers=48) / 1e9) == 60


def test_the_head_peaks_at_two_and_a_half_times_the_fp32_logits_forward_and_three_backward():
    spec = model("llama-2-7b")
    end = train(spec, TrainingPlan(seq=4096)).worst.segments[-1].bytes
    logits = 4 * 4096 * 32000
    kept = 8 * 4096 * 4096
    assert end.forward_peak == pytest.approx(2.5 * logits + kept, rel=0.001)
    assert end.backward_peak == pytest.approx(3 * logits + kept, rel=0.001)
    assert end.kept == pytest.approx(logits + kept, rel=0.001)


def test_full_recomputation_keeps_the_input_of_each_layer():
    spec = model("llama-2-7b")
    assert layer_bytes(spec, TrainingPlan(seq=4096, recompute="full")) == 2 * 4096 * 4096


def test_context_parallelism_divides_the_sequence():
    spec = model("llama-2-7b")
    assert layer_bytes(spec, TrainingPlan(seq=8192, cp=4)) == layer_bytes(spec, TrainingPlan(seq=2048))


def test_chunked_and_fused_losses_keep_no_logits():
    spec = model("meta-llama-3-8b")
    full, chunked, fused = (train(spec, TrainingPlan(seq=8192, loss=loss)) for loss in ("full", "chunked", "fused"))
    assert full.activations_bytes - chunked.activations_bytes == 4 * 8192 * 128256 + 8 * 8192 + 512
    assert chunked.phases["forward"] < full.phases["forward"]
    assert fused.phases["backward"] < full.phases["backward"]


def test_sequence_parallelism_divides_what_lies_between_and_keeps_the_gathered_inputs_whole():
    spec, s, t = model("llama-2-7b"), 4096, 4
    h, a, d, f = 4096, 32, 128, 11008
    between = 2 * (4 * h + 2 * h + 4) // t  # each norm's fp32 input, normalized input and inverse root
    inside = (8 * a * d + 4 * a + 8 * f) // t  # query, key, value, output, logsumexp; gate, activated, up, product
    gathered = 2 * 2 * h
    seeds = 2 * 512
    assert layer_bytes(spec, TrainingPlan(seq=s, tp=t)) == s * (between + inside + gathered) + seeds


def test_sequence_parallelism_divides_activation_checkpoints_as_zero_r_does():
    """ZeRO, arXiv 1910.02054, section 6.1: the checkpoints of a model-parallel group, one copy over all its ranks."""
    values = {"seq": 2048, "tp": 8, "implementation": "fused", "recipe": "megatron-bf16", "recompute": "full"}
    checkpoints = 32 * 2 * 2048 * 4096
    for partitioned, degree in ((False, 1), (True, 8)):
        found = train(model("llama-2-7b"), TrainingPlan(sequence_parallel=partitioned, **values)).worst
        assert sum(segment.bytes.kept for segment in found.segments if segment.inside) == checkpoints // degree
