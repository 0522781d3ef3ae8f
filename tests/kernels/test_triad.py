"""The triad kernel computes STREAM's a + scale·b as accurately as PyTorch."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import triad as kernel  # noqa: E402
from tests.kernels.precision import assert_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (63,), (64,), (3, 37, 5)], ids=str)
def test_a_triad_is_as_accurate_as_pytorchs(shape, dtype, device):
    a, b = (normal(*shape, dtype=dtype, device=device, seed=seed) for seed in range(2))
    out = kernel.triad(a, b, 3.5)
    assert_as_accurate(out, kernel.reference(a, b, 3.5), a.double() + 3.5 * b.double())


def test_no_elements_give_none(device):
    assert kernel.triad(torch.zeros(0, 3, device=device), torch.zeros(0, 3, device=device), 2.0).shape == (0, 3)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(3), torch.zeros(4), r"b must have shape \(3,\); its shape is \(4,\)"),
        (torch.zeros(3), torch.zeros(3).half(), "b must be float32; it is float16"),
        (torch.zeros(3).long(), torch.zeros(3).long(), r"a must be one of .*; it is int64"),
        (torch.zeros(3, 2).t(), torch.zeros(2, 3), "a must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(a, b, message, device):
    with pytest.raises(ValueError, match=message):
        kernel.triad(a.to(device), b.to(device), 1.0)


def test_it_moves_each_element_three_times():
    assert kernel.bytes_moved(torch.zeros(3, 5).half()) == 3 * 15 * 2
