"""Where tools in wide use answer wrongly: what they say, and what we say."""

from __future__ import annotations

import pytest

from calc.catalogue import load
from calc.parameters import parameters
from calc.stored import hub_total
from calc.training import TrainingPlan, train
from calc.units import GiB

# model, the safetensors total of its page on the hub, parameters of the model
HUB = [
    ("qwen3-0.6b", 751_632_384, 596_049_920),  # stores its tied head twice
    ("gpt2", 137_022_720, 124_439_808),  # twelve masks of 1024 x 1024
    ("deepseek-v3", 684_531_386_000, 671_026_404_352),  # prediction layer and scales
    ("gpt-oss-20b", 21_511_953_984, 20_914_757_184),  # scales of MXFP4 blocks
]


@pytest.mark.parametrize(("name", "stated", "total"), HUB)
def test_a_total_of_the_hub_is_told_apart_from_the_parameters(name, stated, total):
    answer = parameters(load(name))
    found = hub_total(answer)
    assert (found.stated, answer.total) == (stated, total)
    assert found.difference == stated - total
    assert found.reasons


def test_states_that_are_sharded_and_offloaded_are_not_the_memory_of_the_gpu():
    """DeepSpeed's estimator of ZeRO-3 with everything offloaded: four bytes for each parameter of the largest layer
    (deepspeed/runtime/zero/stage3.py, estimate_zero3_model_states_mem_needs)."""
    said = 4 * 32_000 * 4096
    assert round(said / GiB, 2) == 0.49
    plan = TrainingPlan(seq=4096, dp=8, zero=3, recipe="mixed-16", offload="parameters")
    answer = train(load("llama-2-7b"), plan)
    assert answer.worst.states == (0, 0, 0)
    assert answer.activations_bytes > 40 * said
    assert answer.driver_bytes > answer.peak_bytes > answer.activations_bytes


def test_flash_attention_leaves_nothing_for_selective_recomputation_to_save():
    """Of the paper's 34 + 5 a s / h the second term goes; with flash attention it was never there (arXiv 2205.05198, 2205.14135)."""
    spec = load("meta-llama-3-8b")
    plans = [TrainingPlan(implementation="fused", recompute=level) for level in ("none", "selective")]
    none, selective = (train(spec, plan) for plan in plans)
    assert none.activations_bytes == selective.activations_bytes
    paper = [TrainingPlan(implementation="paper", recompute=level) for level in ("none", "selective")]
    without, saved = (train(spec, plan).activations_bytes for plan in paper)
    assert without - saved == 32 * 5 * 32 * 4096**2  # layers, bytes a score, heads, s squared


def test_one_model_keeps_as_many_activations_as_it_has_programs():
    """Bytes of a layer over s b h (Llama-2-7B at 4096): no single formula answers for all."""
    spec = load("llama-2-7b")
    changes = {
        "transformers, 16 bits": {},
        "transformers, eager attention": {"attention": "eager"},
        "transformers, AMP": {"recipe": "amp"},
        "Megatron": {"implementation": "fused"},
        "paper": {"implementation": "paper"},
    }
    kept = {}
    for name, change in changes.items():
        layer = train(spec, TrainingPlan(seq=4096, **change)).worst.segments[1]
        kept[name] = round(layer.bytes.kept / (4096 * 4096), 1)
    assert kept == {
        "transformers, 16 bits": 45.5,
        "transformers, eager attention": 237.5,
        "transformers, AMP": 79.7,
        "Megatron": 32.1,
        "paper": 194.0,
    }
