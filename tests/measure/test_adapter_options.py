"""Adapters as people set them: the formula and peft's own program agree on bytes, option by option."""

from __future__ import annotations

import pytest

from calc.catalogue import load_config
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from tests.recorded.programs import peft_step

pytestmark = pytest.mark.recorded

COPIES = ("embed_tokens", "lm_head")
CASES = [
    ({"recipe": "bf16-autocast", "recompute": "full"}, {}),
    ({}, {"adapter_format": "bf16"}),
    ({"lora_targets": ("q_proj", "down_proj")}, {"lora_dropout": 0.05}),
    ({"recompute": "full"}, {"modules_to_save": COPIES}),
    ({"recipe": "bf16-autocast"}, {"modules_to_save": COPIES}),
]


@pytest.mark.parametrize(("options", "chosen"), CASES, ids=[str({**a, **b}) for a, b in CASES])
def test_the_formula_is_the_traced_program(options, chosen):
    shape = {"seq": 512, "micro_batch": 2, "method": "lora"}
    config = load_config("llama-2-7b")
    seen = peft_step(config, {**shape, **options}, chosen)
    predicted = train(from_config(config, "llama-2-7b"), TrainingPlan(**shape, **options, **chosen))
    assert {name: getattr(predicted, name) for name in seen} == seen
