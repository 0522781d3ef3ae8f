"""Adapters as people set them: the formula and peft's own program agree on bytes, option by option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from calc.catalogue import load_config
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from measure.trace import TraceOptions, model, trace_step

pytestmark = pytest.mark.torch

COPIES = ("embed_tokens", "lm_head")
CASES = [
    ({"recipe": "bf16-autocast", "recompute": "full"}, {}),
    ({}, {"adapter_format": "bf16"}),
    ({"lora_targets": ("q_proj", "down_proj")}, {"lora_dropout": 0.05}),
    ({"recompute": "full"}, {"modules_to_save": COPIES}),
    ({"recipe": "bf16-autocast"}, {"modules_to_save": COPIES}),
]


def adapted_by_peft(chosen: dict[str, Any]) -> Any:
    """What puts the adapters on a traced model, by peft's own names for the options."""
    from peft import LoraConfig, get_peft_model

    def adapt(found: nn.Module, options: TraceOptions) -> nn.Module:
        config = LoraConfig(
            r=options.lora_rank,
            target_modules=list(options.lora_targets) or None,
            task_type="CAUSAL_LM",
            lora_dropout=chosen.get("lora_dropout", 0.0),
            modules_to_save=list(chosen.get("modules_to_save", ())) or None,
        )
        wide = chosen.get("adapter_format", "fp32") == "fp32"
        return get_peft_model(found, config, autocast_adapter_dtype=wide)

    return adapt


@pytest.mark.parametrize(("options", "chosen"), CASES, ids=[str({**a, **b}) for a, b in CASES])
def test_the_formula_is_the_traced_program(options, chosen, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(model, "_with_adapters", adapted_by_peft(chosen))
    traced = dict(options)
    if traced.get("recipe") == "bf16-autocast":  # the trace's autocast, of a model that was loaded in bf16
        traced["recipe"] = "amp"
        monkeypatch.setitem(model._DTYPES, "amp", torch.bfloat16)
    shape = {"seq": 512, "micro_batch": 2, "method": "lora"}
    config = load_config("llama-2-7b")
    seen = trace_step(config, TraceOptions(**shape, **traced))
    told = train(from_config(config, "llama-2-7b"), TrainingPlan(**shape, **options, **chosen))
    names = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "peak_bytes", "peak_phase")
    assert {each: getattr(told, each) for each in names} == {each: getattr(seen, each) for each in names}
