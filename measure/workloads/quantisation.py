"""Quantisation errors on real tensors against their bounds: absmax int8 and NF4, on a built model's weights and activations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from calc.measurements.records import Measured
from measure.setting import Setting
from measure.trace import TraceOptions
from measure.trace.model import build, quiet
from measure.workloads.cases import Case, each
from measure.workloads.models import SMALL

_BLOCK: Final = 64  # weights that share a scale in NF4
_GROUP: Final = 256  # scales of NF4 that share one of their own
# the 16 values of NF4: QLoRA, arXiv 2305.14314, appendix E
NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NF4_BOUND: Final = (NF4[1] - NF4[0]) / 2  # half of the widest gap, in units of the block's largest value


def run(setting: Setting) -> Iterator[Measured]:
    """For each tensor: the step and the largest error of absmax int8 and of NF4 (predicted: the bound), and int8's RMS error;
    the error that double quantisation adds to a scale, and the bits that a weight then takes."""
    cases = [
        Case("uniform on [-2, 2]", lambda divisor: _errors(torch.linspace(-2, 2, 2**20 + 1, dtype=torch.float64))),
        *(Case(name, partial(_of_model, setting, name)) for name in ("embedding", "MLP weight", "hidden states")),
    ]
    return each(setting, cases)


def _of_model(setting: Setting, name: str, divisor: int) -> Iterator[Measured]:
    torch.manual_seed(0)
    device = torch.device(setting.device.name)
    with quiet():
        model = build(SMALL[setting.size], TraceOptions(recipe="fp32"), device).eval()
    if name == "embedding":
        tensor = model.get_input_embeddings().weight  # type: ignore[operator]
    elif name == "MLP weight":
        tensor = model.get_submodule("model.layers.0.mlp.gate_proj").weight
    else:
        tokens = torch.randint(0, SMALL[setting.size]["vocab_size"], (1, 256 // divisor), device=device)
        with torch.no_grad():
            tensor = model(tokens, output_hidden_states=True).hidden_states[-1]
    assert isinstance(tensor, Tensor)
    return _errors(tensor.detach().double())


def _errors(x: Tensor) -> Iterator[Measured]:
    """In float64, so that what is measured is the quantiser's error alone."""
    largest = float(x.abs().max())
    step = largest / 127
    error = x - absmax_int8(x)
    yield Measured("", "int8/largest error", largest / 254, float(error.abs().max()), "")
    yield Measured("", "int8/rms error", step / math.sqrt(12), float(error.square().mean().sqrt()), "")
    codes = torch.unique(absmax_int8(x))
    yield Measured("", "int8/step", step, float(codes.diff().min()), "")
    blocks = x.flatten()[: x.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    relative = (blocks - nf4(blocks)).abs() / scales
    yield Measured("", "nf4/largest error over the block's largest value", NF4_BOUND, float(relative.max()), "")
    yield from _double(scales.flatten())


def _double(absmaxes: Tensor) -> Iterator[Measured]:
    """Double quantisation: the blocks' absmaxes, less their mean, as int8 with a scale for each group of 256."""
    off = absmaxes - absmaxes.mean()
    groups = functional.pad(off, (0, -len(off) % _GROUP)).view(-1, _GROUP)
    codes, scales = absmax_int8_rows(groups)
    error = (groups - codes * scales).abs() / groups.abs().amax(1, keepdim=True)
    yield Measured("", "nf4/largest error of an absmax over its group's largest", 1 / 254, float(error.max()), "")
    weights = len(absmaxes) * _BLOCK
    kept = weights / 2 + codes.nbytes + 4 * scales.numel()
    yield Measured("", "nf4/bits a weight", 4 + 8 / _BLOCK + 32 / (_BLOCK * _GROUP), 8 * kept / weights, "bits")


def absmax_int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of each row of x: q = round(127·x / M) with M the row's largest |x|, and M / 127."""
    scales = x.abs().amax(1, keepdim=True) / 127
    return torch.round(x / scales).to(torch.int8), scales


def absmax_int8(x: Tensor) -> Tensor:
    """x through int8 and back: q = round(127·x / M) with M the largest |x|."""
    codes, scale = absmax_int8_rows(x.reshape(1, -1))
    return (codes * scale).view_as(x)


def nf4(blocks: Tensor) -> Tensor:
    """Each row through NF4 and back: the nearest of 16 values, scaled by the row's largest |x|."""
    values = torch.tensor(NF4, dtype=blocks.dtype, device=blocks.device)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = torch.bucketize(blocks / scales, (values[1:] + values[:-1]) / 2)
    return values[nearest] * scales
