"""DPO and GRPO against the program itself (`trl_program`): every phase's highest point."""

from __future__ import annotations

from typing import Any

import pytest

from calc.catalogue import load_config
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from tests.recorded.programs import trl_peaks

pytestmark = pytest.mark.recorded

CLOSE = 0.0005  # of a phase's highest point: the two indices, and what the loss makes of a number for each token


def small(name: str, layers: int = 3) -> dict[str, Any]:
    return {**load_config(name), "num_hidden_layers": layers}


DPO = [
    ("llama-3.2-1b", {"seq": 1024, "prompt_tokens": 512}),
    ("llama-2-7b", {"seq": 1024, "prompt_tokens": 1, "micro_batch": 2}),
    ("llama-2-7b", {"seq": 2048, "prompt_tokens": 256, "recipe": "fp32"}),
    ("qwen3-0.6b", {"seq": 4096, "prompt_tokens": 1024, "recompute": "full"}),
    ("llama-2-7b", {"seq": 1024, "prompt_tokens": 512, "reference": False}),
    ("llama-2-7b", {"seq": 1024, "prompt_tokens": 512, "method": "lora"}),
]


@pytest.mark.parametrize(("name", "changes"), DPO, ids=str)
def test_dpo_is_the_program_of_policy_and_reference(name, changes):
    values = {"micro_batch": 1, **changes}
    config = small(name)
    predicted = train(from_config(config, name), TrainingPlan(objective="dpo", **values))
    options = {key: values[key] for key in ("recipe", "recompute", "method") if key in values}
    seen = trl_peaks(
        "dpo",
        config,
        values.get("reference") is not False,
        values["prompt_tokens"],
        values["seq"],
        values["micro_batch"],
        **options,
    )
    for phase in ("forward", "backward", "step"):
        assert abs(predicted.phases[phase] / seen[phase] - 1) < CLOSE, phase


GRPO = [
    ("llama-3.2-1b", {"seq": 1024, "prompt_tokens": 256, "micro_batch": 8}),
    ("llama-2-7b", {"seq": 4096, "prompt_tokens": 512, "micro_batch": 4, "reference": True}),
    ("llama-2-7b", {"seq": 1024, "prompt_tokens": 1023, "micro_batch": 8, "recompute": "full"}),
    ("llama-3.2-1b", {"seq": 512, "prompt_tokens": 64, "micro_batch": 64, "recompute": "full"}),
]


@pytest.mark.parametrize(("name", "changes"), GRPO, ids=str)
def test_grpo_is_the_program_of_rollout_reference_and_update(name, changes):
    values = dict(changes)
    config = small(name)
    predicted = train(from_config(config, name), TrainingPlan(objective="grpo", **values))
    options = {key: values[key] for key in ("recipe", "recompute") if key in values}
    with_reference = values.get("reference", False)
    seen = trl_peaks(
        "grpo", config, with_reference, values["prompt_tokens"], values["seq"], values["micro_batch"], **options
    )
    for phase in ("rollout", *(("reference",) if with_reference else ()), "forward", "backward", "step"):
        assert abs(predicted.phases[phase] / seen[phase] - 1) < CLOSE, phase
