"""Weight-only int8 is as accurate as restoring the weights and multiplying in PyTorch."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import int8_matmul as kernel  # noqa: E402
from kernels.quantize_int8 import quantize_int8  # noqa: E402
from tests.kernels.precision import assert_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch


def operands(m, n, k, dtype, device):
    q, scale = quantize_int8(normal(n, k, device=device, seed=1))
    return normal(m, k, dtype=dtype, device=device), q, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 37, 65), (3, 33, 48), (35, 70, 19)])
def test_a_product_is_as_accurate_as_pytorchs(m, n, k, dtype, device):
    x, q, scale = operands(m, n, k, dtype, device)
    true = x.double() @ (q.double() * scale.double()[:, None]).t()
    assert_as_accurate(kernel.int8_matmul(x, q, scale), kernel.reference(x, q, scale), true)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 3), (5, 0, 3), (5, 3, 0)])
def test_an_empty_operand_gives_zeros_or_nothing(m, n, k, device):
    x, q, scale = operands(m, n, k, torch.float16, device)
    assert torch.equal(kernel.int8_matmul(x, q, scale), torch.zeros(m, n, dtype=torch.float16, device=device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 4)}, r"x must be one of .*; it is float32"),
        ({"x": torch.zeros(3, 6).half()}, r"weight must have 6 columns, as x has; its shape is \(7, 5\)"),
        ({"x": torch.zeros(5, 3).half().t()}, "x must be contiguous"),
        ({"weight": torch.zeros(7, 5)}, "weight must be int8; it is float32"),
        ({"scale": torch.zeros(6)}, r"scale must have shape \(7,\); its shape is \(6,\)"),
        ({"scale": torch.zeros(7).half()}, "scale must be float32; it is float16"),
    ],
)
def test_what_does_not_fit_is_refused(change, message, device):
    given = dict(zip(("x", "weight", "scale"), operands(3, 7, 5, torch.float16, device), strict=True))
    given |= {name: x.to(device) for name, x in change.items()}
    with pytest.raises(ValueError, match=message):
        kernel.int8_matmul(*given.values())


def test_it_moves_one_byte_a_weight():
    x, q = torch.zeros(3, 5).half(), torch.zeros(7, 5, dtype=torch.int8)
    assert kernel.bytes_moved(x, q) == 2 * (15 + 21) + 35 + 28
