"""The copy kernel moves every bit and nothing else."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels import copy as kernel  # noqa: E402

pytestmark = pytest.mark.torch

SHAPES = [(1,), (3,), (1023,), (1024,), (1025,), (7, 11, 13), (5, 1, 409), (2049, 3), ()]
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def random_bits(shape, dtype, device, seed=0):
    """Any bit pattern that the dtype can hold: NaNs, infinities and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool().to(device)
    width = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, width), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape).to(device)


def bits(tensor):
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_copy_equals_its_reference_bit_for_bit(shape, dtype, device):
    x = random_bits(shape, dtype, device)
    before = bits(x).clone()
    out = kernel.copy(x)
    assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
    assert out.data_ptr() != x.data_ptr()
    assert torch.equal(bits(out), bits(kernel.reference(x)))
    assert torch.equal(bits(x), before)


@pytest.mark.parametrize("n", [1, 1000, 1024, 1025, 5000])
def test_every_element_is_written_and_none_next_to_them(n, device):
    """The output lies in poisoned memory: a byte not written, or one written beyond the end, shows."""
    x = random_bits((n,), torch.int32, device)
    guarded = torch.full((n + 2048,), 0x5EADBEEF, dtype=torch.int32, device=device)
    kernel.copy_into(guarded[1024 : 1024 + n], x)
    assert torch.equal(guarded[1024 : 1024 + n], x)
    assert (guarded[:1024] == 0x5EADBEEF).all()
    assert (guarded[1024 + n :] == 0x5EADBEEF).all()


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_memory_that_is_not_aligned_to_16_bytes_is_copied(offset, device):
    x = random_bits((4096,), torch.bfloat16, device)[offset:]
    assert torch.equal(bits(kernel.copy(x)), bits(x))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_an_empty_tensor_gives_an_empty_copy(shape, device):
    assert kernel.copy(torch.empty(shape, device=device)).shape == shape


def test_a_tensor_that_is_not_contiguous_is_refused(device):
    with pytest.raises(ValueError, match=r"x must be contiguous; its shape is \(4, 3\), its strides \(1, 4\)"):
        kernel.copy(torch.zeros(3, 4, device=device).t())


def test_an_output_that_is_not_contiguous_is_refused(device):
    with pytest.raises(ValueError, match="out must be contiguous"):
        kernel.copy_into(torch.zeros(3, 4, device=device).t(), torch.zeros(4, 3, device=device))


@pytest.mark.parametrize("out", [torch.zeros(4), torch.zeros(3, dtype=torch.float16)], ids=["shape", "dtype"])
def test_an_output_that_does_not_match_is_refused(out, device):
    with pytest.raises(ValueError, match="out must match x"):
        kernel.copy_into(out.to(device), torch.zeros(3, device=device))


def test_elements_of_16_bytes_are_refused(device):
    with pytest.raises(ValueError, match=r"1, 2, 4 or 8 bytes; torch.complex128 has 16"):
        kernel.copy(torch.zeros(3, dtype=torch.complex128, device=device))


def test_a_cpu_tensor_outside_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(kernel, "is_interpreted", lambda: False)
    with pytest.raises(ValueError, match="x must be on a GPU; it is on cpu"):
        kernel.copy(torch.zeros(3))


def test_it_moves_each_byte_twice():
    assert kernel.bytes_moved(torch.zeros(7, 11, dtype=torch.bfloat16)) == 2 * 77 * 2
