"""Adapters as people set them: the formula and peft's own program agree on bytes, option by option."""

from __future__ import annotations

import pytest

from calc.catalogue import load_config
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from measure.trace import TraceOptions, trace_step

pytestmark = pytest.mark.torch

CASES = [
    ("llama-2-7b", {"recipe": "bf16-autocast", "recompute": "full"}),
    ("llama-2-7b", {"adapter_format": "bf16"}),
    ("llama-2-7b", {"lora_dropout": 0.05, "lora_targets": ("q_proj", "down_proj")}),
    ("llama-2-7b", {"modules_to_save": ("embed_tokens", "lm_head"), "recompute": "full"}),
    ("llama-2-7b", {"modules_to_save": ("embed_tokens", "lm_head"), "recipe": "bf16-autocast"}),
]


@pytest.mark.parametrize(("name", "changes"), CASES, ids=[str(changes) for _, changes in CASES])
def test_the_formula_is_the_traced_program(name, changes):
    pytest.importorskip("peft")
    options = {"seq": 512, "micro_batch": 2, "method": "lora", **changes}
    config = load_config(name)
    seen = trace_step(config, TraceOptions(**options))
    told = train(from_config(config, name), TrainingPlan(**options))
    names = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "peak_bytes", "peak_phase")
    assert {each: getattr(told, each) for each in names} == {each: getattr(seen, each) for each in names}
