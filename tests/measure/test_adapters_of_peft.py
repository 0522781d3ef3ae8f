"""Variants of LoRA as peft builds them on the meta device: what takes the same bytes, and what AdaLoRA adds."""

from __future__ import annotations

import pytest
import torch

from calc.catalogue import load_config
from calc.model.config import from_config
from calc.parameters import lora_parameters
from measure.trace.model import build, quiet
from measure.trace.options import TraceOptions

pytestmark = pytest.mark.torch

NAME, TARGETS, RANK = "llama-3.2-1b", ["q_proj", "v_proj", "down_proj"], 12


def adapted(config) -> torch.nn.Module:
    from peft import get_peft_model

    with quiet():
        return get_peft_model(build(load_config(NAME), TraceOptions(seq=64)), config)


def trained(model: torch.nn.Module) -> int:
    """Parameters of the adapters (AdaLoRA's note of its present rank, a number a layer, is not one)."""
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)


def test_rslora_has_the_parameters_of_lora():
    from peft import LoraConfig

    model = adapted(LoraConfig(r=RANK, target_modules=TARGETS, use_rslora=True, task_type="CAUSAL_LM"))
    assert trained(model) == lora_parameters(from_config(load_config(NAME), NAME), RANK, ",".join(TARGETS))


def test_adalora_adds_a_vector_a_layer_and_three_copies_for_importance():
    from peft import AdaLoraConfig
    from peft.tuners.adalora.layer import RankAllocator

    config = AdaLoraConfig(init_r=RANK, target_r=4, target_modules=TARGETS, task_type="CAUSAL_LM", total_step=10)
    model = adapted(config)
    layers = 16 * len(TARGETS)
    adapters = lora_parameters(from_config(load_config(NAME), NAME), RANK, ",".join(TARGETS)) + layers * RANK
    assert trained(model) == adapters
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    allocator = RankAllocator(model, config, "default")
    allocator.update_ipt(model)
    scores = (allocator.ipt, allocator.exp_avg_ipt, allocator.exp_avg_unc)
    assert sum(score.numel() for each in scores for score in each.values()) == 3 * adapters
