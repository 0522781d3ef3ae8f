"""NF4 equals PyTorch's bit for bit, restores within its bounds, and takes the bytes it claims."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import quantize_nf4 as kernel  # noqa: E402
from tests.kernels.precision import assert_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1,), (63,), (64,), (3, 37), (5, 13, 7), (300, 65)]  # the last has two groups of absmaxes


def parts(weights):
    return [getattr(weights, field.name) for field in dataclasses.fields(weights)]


def test_the_levels_are_normal_quantiles_as_the_paper_and_bitsandbytes_make_them():
    offset = 0.9677083
    below = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    above = torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    # eight values on the positive side, seven on the negative one; the published table has them the other way round
    expected = torch.cat([-below, torch.zeros(1, dtype=torch.float64), above]).sort().values / below.max()
    published = torch.tensor(kernel.LEVELS, dtype=torch.float64)
    assert torch.allclose(published, expected, atol=2e-7) or torch.allclose(published, -expected.flip(0), atol=2e-7)


@pytest.mark.parametrize("double", [False, True], ids=["once", "double"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantising_equals_pytorchs(shape, dtype, double, device):
    x = normal(*shape, dtype=dtype, device=device)
    for found, expected in zip(parts(kernel.quantize_nf4(x, double)), parts(kernel.reference(x, double)), strict=True):
        assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected


@pytest.mark.parametrize("double", [False, True], ids=["once", "double"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_restored_weights_are_as_accurate_as_pytorchs(shape, dtype, double, device):
    weights = kernel.quantize_nf4(normal(*shape, dtype=dtype, device=device), double)
    true = kernel.reference_dequantize(weights, torch.float64)
    assert_as_accurate(kernel.dequantize_nf4(weights), kernel.reference_dequantize(weights), true)


def test_every_level_is_restored_exactly_from_the_high_bits_first(device):
    x = torch.tensor(kernel.LEVELS, device=device).repeat(4) * 0.25
    weights = kernel.quantize_nf4(x)
    assert weights.packed[:4].tolist() == [0x01, 0x23, 0x45, 0x67]
    assert torch.equal(kernel.dequantize_nf4(weights), x)


def test_a_weight_halfway_between_levels_takes_the_lower_as_pytorchs(device):
    levels = torch.tensor(kernel.LEVELS, device=device)
    x = torch.cat([(levels[1:] + levels[:-1]) / 2, torch.ones(1, device=device)])
    packed = kernel.quantize_nf4(x).packed
    assert packed.tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert torch.equal(packed, kernel.reference(x).packed)


def test_errors_keep_within_half_the_widest_gap(device):
    x = normal(40, 64, device=device)
    absmax = x.abs().amax(1, keepdim=True)
    once = kernel.dequantize_nf4(kernel.quantize_nf4(x))
    widest = max(b - a for a, b in zip(kernel.LEVELS, kernel.LEVELS[1:], strict=False)) / 2
    assert round(widest, 3) == 0.152
    assert ((x - once).abs() <= widest * absmax * (1 + 1e-6)).all()
    double = kernel.dequantize_nf4(kernel.quantize_nf4(x, double=True))
    distance = (absmax - absmax.mean()).abs().max() / 254
    assert ((x - double).abs() <= widest * absmax + distance + 1e-6).all()


@pytest.mark.parametrize(("double", "bits"), [(False, 4.5), (True, 4.127)])
def test_the_bits_a_weight_are_the_papers(double, bits, device):
    n = 2**14
    weights = kernel.quantize_nf4(normal(n, device=device), double)
    mean = 4 if double else 0  # of all weights together
    assert round((weights.nbytes - mean) * 8 / n, 3) == bits


def test_zeros_and_no_weights_are_borne(device):
    for double in (False, True):
        assert not kernel.dequantize_nf4(kernel.quantize_nf4(torch.zeros(3, 50, device=device), double)).any()
        assert kernel.dequantize_nf4(kernel.quantize_nf4(torch.zeros(0, 3, device=device), double)).shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 4).double(), r"x must be one of .*; it is float64"),
        (torch.zeros(3, 4).t(), "x must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(x, message, device):
    with pytest.raises(ValueError, match=message):
        kernel.quantize_nf4(x.to(device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (101,)}, r"packed must have shape \(51,\); its shape is \(50,\)"),
        ({"packed": torch.zeros(50)}, "packed must be uint8; it is float32"),
        ({"absmax": torch.zeros(3)}, r"absmax must have shape \(2,\); its shape is \(3,\)"),
        ({"dtype": torch.int32}, r"the result must be one of .*; it is int32"),
        ({"scale": torch.zeros(1), "mean": torch.zeros(())}, "absmax must be int8; it is float32"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(change, message, device):
    change = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    weights = kernel.quantize_nf4(torch.zeros(100, device=device))
    with pytest.raises(ValueError, match=message):
        kernel.dequantize_nf4(dataclasses.replace(weights, **change))


def test_it_moves_each_weight_its_four_bits_and_its_blocks_absmax():
    assert kernel.bytes_moved(torch.zeros(100).half()) == 200 + 50 + 2 * 4
