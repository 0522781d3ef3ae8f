"""Softmax, both ways, is as accurate as PyTorch's, for rows that fit in registers and for longer ones."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import softmax as kernel  # noqa: E402
from kernels.launch import largest_row  # noqa: E402
from tests.kernels.precision import assert_both_ways_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch

SHAPES = [(1, 1), (3, 37), (5, 64), (2, "longest + 1"), (3, "2 longest + 7")]


def size(n):
    return {"longest + 1": largest_row() + 1, "2 longest + 7": 2 * largest_row() + 7}.get(n, n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_softmax_and_its_gradient_are_as_accurate_as_pytorchs(m, n, dtype, device):
    x, dy = (normal(m, size(n), dtype=dtype, device=device, seed=seed, scale=2.0) for seed in range(2))
    assert_both_ways_as_accurate(kernel.softmax, kernel.reference, [x], dy)


@pytest.mark.parametrize("n", [37, "2 longest + 7"])
def test_infinite_and_very_large_elements_are_borne(n, device):
    x = torch.full((2, size(n)), float("-inf"), device=device)
    x[0, [3, 30]] = 1e30
    x[1, -1] = -1e30
    y = kernel.softmax(x)
    assert torch.equal(y, kernel.reference(x))


def test_no_rows_give_none(device):
    assert kernel.softmax(torch.zeros(0, 3, device=device)).shape == (0, 3)
    assert kernel.softmax(torch.zeros(3, 0, device=device)).shape == (3, 0)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3), r"x must have 2 dimensions; its shape is \(3,\)"),
        (torch.zeros(3, 4).double(), r"x must be one of .*; it is float64"),
        (torch.zeros(4, 3).t(), "x must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(x, message, device):
    with pytest.raises(ValueError, match=message):
        kernel.softmax(x.to(device))


def test_it_moves_each_element_twice():
    assert kernel.bytes_moved(torch.zeros(3, 5).half()) == 2 * 15 * 2
