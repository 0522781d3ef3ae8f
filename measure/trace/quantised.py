"""QLoRA's linear layers in a trace: bitsandbytes' own Linear4bit with fake NF4, run by the operators that CUDA composes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from calc.errors import InputError

BLOCK = 64  # weights that share an absmax


def quantise(model: Any) -> None:
    """Replace the linear layers of a model on the meta device by Linear4bit, as transformers does: all but the head.

    InputError where bitsandbytes is not installed.
    """
    try:
        layers: Any = importlib.import_module("bitsandbytes.nn")
    except ImportError:
        raise InputError.of(
            "method", "qlora", "a trace of it needs bitsandbytes, which is not installed: pip install bitsandbytes"
        ) from None
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D) or (type(module) is nn.Linear and module is not head):
            conv = isinstance(module, Conv1D)
            inputs, outputs = module.weight.shape if conv else (module.in_features, module.out_features)
            bias = module.bias is not None
            with torch.device("meta"):
                made = layers.Linear4bit(inputs, outputs, bias, torch.bfloat16, True, "nf4").requires_grad_(False)
            if bias:
                made.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
            model.set_submodule(name, made)
    model.is_loaded_in_4bit = True


def fill_quantised(model: nn.Module, made: dict[int, nn.Parameter]) -> None:
    """Give each Linear4bit a fake weight in NF4 with double quantisation, and note it among what is `made`."""
    layers = list(_quantised(model))
    functional: Any = importlib.import_module("bitsandbytes.functional") if layers else None
    for module in layers:
        functional.name2qmap.clear()  # its levels may be a tensor of another trace, or a real one
        whole = torch.empty((module.out_features, module.in_features), dtype=torch.bfloat16)
        packed, state = functional.quantize_4bit(whole, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
        weight = nn.Parameter(packed, requires_grad=False)  # a fake tensor can be no Params4bit
        weight.quant_state = state  # type: ignore[attr-defined]
        module.weight, module.quant_state = weight, state
        made[id(weight)] = weight
    if layers:
        functional.name2qmap.clear()


def quantised_parts(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Each layer's weight in NF4 and the tensors that say how to read it, with their names."""
    for module in _quantised(model):
        state = module.weight.quant_state
        yield module, "weight/weight", module.weight
        yield module, "weight/absmax", state.absmax
        yield module, "weight/absmax_scale", state.state2.absmax
        yield module, "nf4_tables", state.code
        yield module, "nf4_tables", state.state2.code
        yield module, "nf4_tables", state.offset


def _quantised(model: nn.Module) -> Iterator[Any]:
    return (
        module for module in model.modules() if type(module).__name__ == "Linear4bit" and hasattr(module, "quant_state")
    )


def dequantised_linear(
    x: Tensor,
    packed: Tensor,
    shape: tuple[int, ...],
    scale: Tensor,
    block: int,
    kind: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """bitsandbytes' matmul of many tokens on CUDA (backends/cuda/ops.py): absmaxes in fp32, the weight in x's format, F.linear."""
    assert absmax_8bit is not None
    assert absmax_offset is not None
    absmax = torch.empty_like(absmax_8bit, dtype=torch.float32)
    shifted = absmax + absmax_offset
    weight = torch.empty(tuple(shape), dtype=x.dtype)
    made = torch.nn.functional.linear(x, weight, bias)
    del shifted, absmax
    return made
