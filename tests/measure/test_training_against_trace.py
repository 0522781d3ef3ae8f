"""The formula against the traced program: states, activations and each phase's highest point, to the byte.

Two sequences in a batch: with one, the program keeps a view of the padded labels, 8 bytes more than the formula.
"""

from __future__ import annotations

import pytest

from calc.catalogue import load_config
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from measure.trace import TraceOptions
from tests.recorded.traces import traced

pytestmark = pytest.mark.recorded
CASES = [
    ("llama-2-7b", {}),
    ("llama-2-7b", {"seq": 4096, "micro_batch": 2}),
    ("llama-2-7b", {"recipe": "amp"}),
    ("llama-2-7b", {"recipe": "fp32"}),
    ("llama-3.2-1b", {"recipe": "fp32"}),  # grouped heads in fp32: plain mathematics
    ("llama-3.2-1b", {"attention": "eager"}),
    ("llama-3.2-1b", {"recompute": "full"}),
    ("llama-3.2-1b", {"optimizer_kernel": "loop"}),
    ("llama-3.2-1b", {"optimizer_kernel": "fused"}),
    ("llama-3.2-1b", {"optimizer": "sgd"}),
    ("llama-2-7b", {"method": "lora"}),
    ("llama-2-7b", {"method": "lora", "lora_targets": ("all-linear",)}),
    ("llama-2-7b", {"method": "dora"}),
    ("llama-2-7b", {"method": "dora", "recompute": "full"}),
    ("gpt2", {"method": "dora", "lora_targets": ("c_attn",)}),  # a bias, taken off first
    ("qwen3-0.6b", {}),
    ("qwen3-0.6b", {"recipe": "amp"}),
    ("qwen2.5-0.5b", {}),
    ("mixtral-8x7b-v0.1", {}),
    ("qwen3-30b-a3b", {}),
    ("qwen3-30b-a3b", {"recipe": "amp"}),
    ("phi-3-mini-4k-instruct", {}),
    ("phi-3-mini-4k-instruct", {"seq": 3072}),  # beyond its window
    ("olmo-2-1124-7b", {}),
    ("gemma-7b", {}),
    ("gemma-2-2b", {}),
    ("gemma-3-1b-it", {"seq": 1024}),
    ("gpt-oss-20b", {}),
    ("glm-4.5-air", {}),
    ("deepseek-v2-lite", {}),
    ("deepseek-v3", {}),
    ("llama-3.2-1b", {"dp": 4, "zero": 3}),
    ("meta-llama-3-8b", {"seq": 1024, "dp": 8, "zero": 3, "recipe": "fsdp-bf16"}),
]


def both(name, changes):
    options = {"seq": 512, "micro_batch": 2, **changes}
    config = load_config(name)
    seen = traced(name, config, TraceOptions(**options))
    accumulation = options.pop("accumulation", 1)
    batch = options["micro_batch"] * accumulation * options.get("dp", 1)
    return train(from_config(config, name), TrainingPlan(global_batch=batch, **options)), seen


@pytest.mark.parametrize(("name", "changes"), CASES, ids=[f"{name}-{changes}" for name, changes in CASES])
def test_the_formula_is_the_traced_program_to_the_byte(name, changes):
    predicted, seen = both(name, changes)
    assert predicted.parameters_bytes == seen.parameters_bytes
    assert predicted.gradients_bytes == seen.gradients_bytes
    assert predicted.optimizer_bytes == seen.optimizer_bytes
    assert predicted.activations_bytes == seen.activations_bytes
    assert predicted.phases == dict(seen.phases)
    assert predicted.peak_bytes == seen.peak_bytes
    assert predicted.peak_phase == seen.peak_phase


def test_the_scores_next_to_sinks_are_the_highest_point_and_the_formula_has_them_all():
    attention = {"method": "lora", "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj")}
    predicted, seen = both("gpt-oss-20b", {"seq": 4096, "recipe": "amp", "recompute": "full", **attention})
    assert predicted.phases["forward"] - seen.phases["forward"] == 512  # the loss, counted while the layers still run
    assert {**predicted.phases, "forward": 0} == {**seen.phases, "forward": 0}
    assert predicted.activations_bytes == seen.activations_bytes


def test_earlier_micro_batches_leave_their_gradients_and_one_loss():
    predicted, seen = both("llama-3.2-1b", {"accumulation": 3})
    assert seen.phases["forward"] - predicted.phases["forward"] == 512  # the loss before this one
    assert {**predicted.phases, "forward": 0} == {**seen.phases, "forward": 0}


def test_a_single_sequence_keeps_one_label_more():
    predicted, seen = both("llama-3.2-1b", {"micro_batch": 1})
    assert seen.activations_bytes - predicted.activations_bytes == 512  # 8 bytes in a storage of their own granule
