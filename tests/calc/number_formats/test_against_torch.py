"""Number formats against torch's casts and fake quantisation, and against bitsandbytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calc.number_formats import example, number_format, quantize

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp8-e4m3", torch.float8_e4m3fn),
        ("fp8-e5m2", torch.float8_e5m2),
    ],
)
def test_casts_equal_torch(name, kind):
    values = torch.from_numpy(example("activations")).double()
    form, info = number_format(name), torch.finfo(kind)
    assert (form.max, form.smallest_normal, form.spacing(1.0)) == (info.max, info.smallest_normal, info.eps)
    scale = (values.abs().max() / info.max).float().double() if form.bits == 8 else torch.tensor(1.0).double()
    expected = (values / scale).to(kind).double() * scale
    assert (quantize(values.numpy(), name) == expected.float().numpy()).all()


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_four_bit_tables_equal_bitsandbytes(name):
    functional = pytest.importorskip("bitsandbytes.functional")
    levels = functional.get_4bit_type(name, device="cpu")
    assert number_format(name).levels == pytest.approx(sorted(set(levels.tolist())), rel=1e-6)
    values = torch.from_numpy(example())
    packed, state = functional.quantize_4bit(values, blocksize=64, quant_type=name)
    expected = functional.dequantize_4bit(packed, state).numpy()
    found = quantize(values.numpy(), name)
    assert (np.abs(found - expected) > 1e-6).mean() < 1e-4  # a value halfway between two levels may go to either


def test_int8_rows_equal_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    values = torch.from_numpy(example()).half()
    whole, scales, _ = functional.int8_vectorwise_quant(values)
    expected = whole.float() * scales[:, None] / 127
    found = quantize(values.float().numpy(), "int8")
    assert (
        np.abs(found - expected.numpy()) > 1e-6
    ).mean() < 1e-4  # a value halfway between two levels may go to either


def test_int4_groups_equal_torch_fake_quantisation():
    values = torch.from_numpy(example(rows=16)).view(-1, 128)
    low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = torch.round(-low / scale).int()
    expected = torch.fake_quantize_per_channel_affine(values, scale, zero, 0, 0, 15)
    found = quantize(values.numpy(), "int4")
    assert (np.abs(found - expected.numpy()) > 1e-6).mean() < 1e-3
