"""RMSNorm, both ways, is as accurate as PyTorch's."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import rms_norm as kernel  # noqa: E402
from tests.kernels.precision import assert_both_ways_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch


def inputs(m, n, dtype, device):
    x, dy = (normal(m, n, dtype=dtype, device=device, seed=seed) for seed in range(2))
    weight = normal(n, dtype=dtype, device=device, seed=2)
    return [x, weight], dy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 37), (7, 64), (2, 129)])
def test_the_norm_and_its_gradient_are_as_accurate_as_pytorchs(m, n, dtype, device):
    given, dy = inputs(m, n, dtype, device)
    assert_both_ways_as_accurate(kernel.rms_norm, kernel.reference, given, dy, eps=1e-3)


def test_no_rows_give_none_and_a_gradient_of_zeros(device):
    given, dy = inputs(0, 5, torch.float32, device)
    leaves = [x.requires_grad_() for x in given]
    kernel.rms_norm(*leaves).backward(dy)
    assert leaves[0].grad.shape == (0, 5)
    assert not any(leaf.grad.any() for leaf in leaves[1:])


def test_the_gradient_is_the_same_every_time(device):
    given, dy = inputs(50, 33, torch.float32, device)
    grads = []
    for _ in range(2):
        leaves = [x.detach().clone().requires_grad_() for x in given]
        kernel.rms_norm(*leaves).backward(dy)
        grads.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(3), torch.zeros(3), r"x must have 2 dimensions; its shape is \(3,\)"),
        (torch.zeros(3, 4), torch.zeros(3), r"weight must have shape \(4,\); its shape is \(3,\)"),
        (torch.zeros(3, 4), torch.zeros(4).half(), "weight must be float32; it is float16"),
        (torch.zeros(3, 4).double(), torch.zeros(4), r"x must be one of .*; it is float64"),
        (torch.zeros(4, 3).t(), torch.zeros(4), "x must be contiguous"),
        (torch.zeros(1, 65537), torch.zeros(65537), r"1 to 65536 elements; its shape is \(1, 65537\)"),
        (torch.zeros(3, 0), torch.zeros(0), r"1 to 65536 elements; its shape is \(3, 0\)"),
    ],
)
def test_what_does_not_fit_is_refused(x, weight, message, device):
    with pytest.raises(ValueError, match=message):
        kernel.rms_norm(x.to(device), weight.to(device))


def test_it_moves_each_element_of_x_twice():
    x = torch.zeros(3, 5).half()
    assert kernel.bytes_moved(x) == 2 * (2 * 15 + 5) + 4 * 3
