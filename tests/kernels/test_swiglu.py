"""SwiGLU, both ways, is as accurate as PyTorch's two kernels."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import swiglu as kernel  # noqa: E402
from tests.kernels.precision import assert_both_ways_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (64,), (3, 37), (2, 5, 29)], ids=str)
def test_swiglu_and_its_gradient_are_as_accurate_as_pytorchs(shape, dtype, device):
    gate, up, dout = (normal(*shape, dtype=dtype, device=device, seed=seed, scale=2.0) for seed in range(3))
    assert_both_ways_as_accurate(kernel.swiglu, kernel.reference, [gate, up], dout)


def test_gates_far_from_zero_neither_overflow_nor_vanish(device):
    gate = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4], device=device)
    assert torch.allclose(kernel.swiglu(gate, torch.ones_like(gate)), torch.relu(gate))


def test_no_elements_give_none(device):
    leaf = torch.zeros(0, 3, device=device, requires_grad=True)
    kernel.swiglu(leaf, leaf).sum().backward()
    assert leaf.grad.shape == (0, 3)


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (torch.zeros(3), torch.zeros(4), r"up must have shape \(3,\); its shape is \(4,\)"),
        (torch.zeros(3), torch.zeros(3).half(), "up must be float32; it is float16"),
        (torch.zeros(3).double(), torch.zeros(3), r"gate must be one of .*; it is float64"),
        (torch.zeros(3, 2).t(), torch.zeros(2, 3), "gate must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(gate, up, message, device):
    with pytest.raises(ValueError, match=message):
        kernel.swiglu(gate.to(device), up.to(device))


def test_it_moves_each_element_three_times():
    assert kernel.bytes_moved(torch.zeros(3, 5).half()) == 3 * 15 * 2
