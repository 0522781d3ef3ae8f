"""peft's own program under the trace, with the options that the trace itself does not have."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from measure.trace import TraceOptions, model, trace_step

NAMES = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "peak_bytes", "peak_phase")


def run(config: dict[str, Any], options: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """What the trace sees of a step whose adapters peft has put on as `chosen`."""
    wanted, formats = dict(options), dict(model._DTYPES)
    if wanted.get("recipe") == "bf16-autocast":  # the trace's autocast, of a model that was loaded in bf16
        wanted["recipe"] = "amp"
        formats["amp"] = torch.bfloat16
    with patch.object(model, "_with_adapters", adapted_by_peft(chosen)), patch.object(model, "_DTYPES", formats):
        seen = trace_step(config, TraceOptions(**wanted))
    return {name: getattr(seen, name) for name in NAMES}


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
