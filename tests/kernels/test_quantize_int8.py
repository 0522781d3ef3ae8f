"""Absmax int8 equals PyTorch's bit for bit and keeps within its bound."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import quantize_int8 as kernel  # noqa: E402
from kernels.launch import largest_row  # noqa: E402
from tests.kernels.precision import assert_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (3, 37), (2, 64), (2, "2 longest + 7")]


def rows(m, n, dtype, device):
    return normal(m, 2 * largest_row() + 7 if n == "2 longest + 7" else n, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_integers_and_scales_equal_pytorchs(m, n, dtype, device):
    x = rows(m, n, dtype, device)
    for found, expected in zip(kernel.quantize_int8(x), kernel.reference(x), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_restored_rows_are_as_accurate_as_pytorchs(m, n, dtype, device):
    q, scale = kernel.quantize_int8(rows(m, n, dtype, device))
    true = kernel.reference_dequantize(q, scale.double(), torch.float64)
    assert_as_accurate(kernel.dequantize_int8(q, scale, dtype), kernel.reference_dequantize(q, scale, dtype), true)


def test_the_error_is_at_most_a_254th_of_the_largest_magnitude(device):
    """On [-2, 2]: steps of 0.015748, errors up to 0.007874."""
    x = torch.linspace(-2, 2, 1001, device=device)[None]
    q, scale = kernel.quantize_int8(x)
    assert round(scale.item(), 6) == 0.015748
    worst = (q.double() * scale.double()[:, None] - x.double()).abs().max().item()
    assert 0.0078 < worst <= 0.007874 + 1e-6
    assert (q.min(), q.max()) == (-127, 127)


def test_ties_go_to_the_even_integer(device):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]], device=device)
    q, scale = kernel.quantize_int8(x)
    assert scale.item() == 1
    assert q.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_rows_of_zeros_and_empty_rows_give_zeros(device):
    q, scale = kernel.quantize_int8(torch.zeros(2, 5, device=device))
    assert not q.any()
    assert not scale.any()
    for shape in ((0, 3), (3, 0)):
        q, scale = kernel.quantize_int8(torch.zeros(shape, device=device))
        assert (q.shape, scale.tolist()) == (shape, [0] * shape[0])
        assert kernel.dequantize_int8(q, scale).shape == shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kernel.quantize_int8(x[0]), r"x must have 2 dimensions; its shape is \(4,\)"),
        (lambda x: kernel.quantize_int8(x.double()), r"x must be one of .*; it is float64"),
        (lambda x: kernel.quantize_int8(x.t()), "x must be contiguous"),
        (lambda x: kernel.dequantize_int8(x, x[:, 0]), "q must be int8; it is float32"),
        (
            lambda x: kernel.dequantize_int8(x.to(torch.int8), x[0]),
            r"scale must have shape \(3,\); its shape is \(4,\)",
        ),
        (
            lambda x: kernel.dequantize_int8(x.to(torch.int8), x[:, 0].contiguous(), torch.int32),
            r"the result must be one of .*; it is int32",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message, device):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 4, device=device))


def test_it_moves_each_element_and_its_byte():
    assert kernel.bytes_moved(torch.zeros(3, 5).half()) == 15 * 3 + 4 * 3
