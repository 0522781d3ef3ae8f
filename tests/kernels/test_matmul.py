"""The matmul kernel is as accurate as PyTorch's in every dtype, and exact in int8."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import matmul as kernel  # noqa: E402
from tests.kernels.precision import assert_as_accurate, normal  # noqa: E402

pytestmark = pytest.mark.torch

SHAPES = [(1, 1, 1), (3, 65, 37), (16, 32, 16), (35, 40, 70)]
FLOATS = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def operands(m, n, k, dtype, device, transposed=False):
    a = normal(m, k, dtype=dtype, device=device)
    b = normal(n, k, seed=1).t() if transposed else normal(k, n, seed=1)
    return a, b.to(dtype).to(device)


def skip_unless_supported(dtype, device):
    if device == "cuda" and torch.cuda.get_device_capability() < kernel.CAPABILITY.get(dtype, (0, 0)):
        pytest.skip(f"this GPU has no {dtype}")


@pytest.mark.parametrize(
    ("transposed", "out_dtype"), [(False, None), (True, torch.float32)], ids=["row", "column, fp32 out"]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_product_of_floats_is_as_accurate_as_pytorchs(m, n, k, dtype, transposed, out_dtype, device):
    skip_unless_supported(dtype, device)
    a, b = operands(m, n, k, dtype, device, transposed)
    product = kernel.matmul(a, b, out_dtype)
    assert product.shape == (m, n)
    assert_as_accurate(product, kernel.reference(a, b, out_dtype), a.double() @ b.double())


@pytest.mark.parametrize("transposed", [False, True], ids=["row", "column"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_product_of_int8_is_exact(m, n, k, transposed, device):
    skip_unless_supported(torch.int8, device)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-128, 128, s, generator=generator, dtype=torch.int8) for s in ((m, k), (k, n)))
    b = b.t().contiguous().t() if transposed else b
    product = kernel.matmul(a.to(device), b.to(device))
    assert product.dtype == torch.int32
    assert torch.equal(product.cpu().long(), a.long() @ b.long())


def test_the_largest_int8_products_do_not_overflow(device):
    skip_unless_supported(torch.int8, device)
    a = torch.full((2, 1000), -128, dtype=torch.int8, device=device)
    assert (kernel.matmul(a, a.t()) == 1000 * 2**14).all()


def test_fp8_subnormals_count(device):
    skip_unless_supported(torch.float8_e4m3fn, device)
    a = torch.full((16, 16), 2.0**-9, device=device).to(torch.float8_e4m3fn)  # the smallest e4m3
    assert (kernel.matmul(a, a, torch.float32) == 16 * 2.0**-18).all()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 3), (5, 0, 3), (5, 3, 0)])
def test_an_empty_operand_gives_zeros_or_nothing(m, n, k, device):
    a, b = operands(m, n, k, torch.float16, device)
    assert torch.equal(kernel.matmul(a, b), torch.zeros(m, n, dtype=torch.float16, device=device))


@pytest.mark.parametrize(
    ("a", "b", "out", "message"),
    [
        (torch.zeros(3, 4).half(), torch.zeros(5, 4).half(), None, r"a is \(3, 4\), b \(5, 4\)"),
        (torch.zeros(3).half(), torch.zeros(3, 4).half(), None, r"a must have 2 dimensions; its shape is \(3,\)"),
        (torch.zeros(3, 4), torch.zeros(4, 5), None, r"a must be one of bfloat16, .*; it is float32"),
        (torch.zeros(3, 4).half(), torch.zeros(4, 5).bfloat16(), None, "b must be float16; it is bfloat16"),
        (torch.zeros(4, 3).half().t(), torch.zeros(4, 5).half(), None, r"a must be contiguous; .* strides \(1, 3\)"),
        (torch.zeros(3, 4).half(), torch.zeros(4, 10).half()[:, ::2], None, "b must be contiguous"),
        (torch.zeros(3, 4).half(), torch.zeros(4, 5).half(), torch.bfloat16, "out_dtype is bfloat16"),
    ],
    ids=["shape", "dimensions", "dtype", "mixed", "a strided", "b strided", "out"],
)
def test_operands_that_do_not_fit_are_refused(a, b, out, message, device):
    with pytest.raises(ValueError, match=message):
        kernel.matmul(a.to(device), b.to(device), out)


def test_operands_on_two_devices_are_refused(device):
    with pytest.raises(ValueError, match=r"b must be on .*, where a is; it is on meta"):
        kernel.matmul(torch.zeros(3, 4, device=device).half(), torch.zeros(4, 5, device="meta").half())


def test_a_gpu_too_old_for_the_dtype_is_refused():
    with pytest.raises(ValueError, match=r"float8_e4m3fn needs compute capability 8\.9; this GPU has 8\.6"):
        kernel.check_capability(torch.float8_e4m3fn, (8, 6))
    kernel.check_capability(torch.float8_e4m3fn, (8, 9))
    kernel.check_capability(torch.float16, (7, 0))


def test_it_counts_two_flops_a_product_and_each_byte_once():
    a, b = torch.zeros(3, 5).half(), torch.zeros(5, 7).half()
    assert kernel.flops(3, 7, 5) == 210
    assert kernel.bytes_moved(a, b, torch.zeros(3, 7)) == 2 * (15 + 35) + 4 * 21
