"""Weight-only int4 is as accurate as restoring the weights and multiplying in PyTorch."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import int4_matmul as kernel  # noqa: E402
from tests.kernels.precision import assert_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch


def operands(m, n, k, dtype, device, group=32):
    packed, scale = kernel.quantize_int4(normal(n, k, device=device, seed=1), group)
    return normal(m, k, dtype=dtype, device=device), packed, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "group"), [(1, 1, 32, 32), (1, 37, 96, 32), (3, 33, 64, 64), (35, 19, 256, 128), (17, 40, 128, 64)]
)
def test_a_product_is_as_accurate_as_pytorchs(m, n, k, group, dtype, device):
    x, packed, scale = operands(m, n, k, dtype, device, group)
    true = x.double() @ kernel.restore(packed, scale.double(), torch.float64).t()
    assert_as_accurate(kernel.int4_matmul(x, packed, scale), kernel.reference(x, packed, scale), true)


def test_every_integer_is_restored_from_its_own_place(device):
    weight = torch.arange(-7, 8, device=device).float().repeat(3)[:32].view(1, 32)
    packed, scale = kernel.quantize_int4(weight, 32)
    assert scale.item() == 1
    assert packed[0, 0].item() == (-7 + 8) + (-6 + 8) * 16
    unit = torch.eye(32, dtype=torch.float16, device=device)
    assert torch.equal(kernel.int4_matmul(unit, packed, scale).t().float(), weight)


def test_errors_of_quantising_keep_within_half_a_step(device):
    weight = normal(5, 128, device=device)
    packed, scale = kernel.quantize_int4(weight, 32)
    off = (kernel.restore(packed, scale, torch.float32) - weight).abs()
    assert (off <= scale.repeat_interleave(32, 1) / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0)])
def test_an_empty_operand_gives_nothing(m, n, device):
    x, packed, scale = operands(m, n, 32, torch.float16, device)
    assert kernel.int4_matmul(x, packed, scale).shape == (m, n)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64)}, r"x must be one of .*; it is float32"),
        ({"x": torch.zeros(3, 62).half()}, r"half as many columns as x, 31; its shape is \(7, 32\)"),
        ({"packed": torch.zeros(7, 32)}, "packed must be uint8; it is float32"),
        ({"scale": torch.zeros(7, 3)}, r"scale must be \(7, 64 / group\) with a group of 32, 64, 128; it is \(7, 3\)"),
        ({"scale": torch.zeros(6, 2)}, r"it is \(6, 2\)"),
        ({"scale": torch.zeros(7, 2).half()}, "scale must be float32; it is float16"),
    ],
)
def test_what_does_not_fit_is_refused(change, message, device):
    given = dict(zip(("x", "packed", "scale"), operands(3, 7, 64, torch.float16, device), strict=True))
    given |= {name: x.to(device) for name, x in change.items()}
    with pytest.raises(ValueError, match=message):
        kernel.int4_matmul(*given.values())


@pytest.mark.parametrize(("shape", "group"), [((3, 33), 32), ((3, 64), 16), ((64,), 32)])
def test_weights_that_do_not_go_into_groups_are_refused(shape, group, device):
    with pytest.raises(ValueError, match=r"weight must be \(N, a multiple of group\), group one of 32, 64, 128"):
        kernel.quantize_int4(torch.zeros(shape, device=device), group)


def test_it_moves_half_a_byte_a_weight():
    x, packed, scale = torch.zeros(3, 64).half(), torch.zeros(7, 32, dtype=torch.uint8), torch.zeros(7, 2)
    assert kernel.bytes_moved(x, packed, scale) == 2 * (3 * 64 + 21) + 7 * 32 + 4 * 14
