"""Where kernels run, as tests/conftest.py has chosen: Triton's interpreter on the CPU, or a GPU (TRITON_INTERPRET=1 keeps to the CPU)."""

from functools import cache

import pytest


def pytest_generate_tests(metafunc):
    """`device`: where a kernel runs in this process. `cpu` when kernels are interpreted, `cuda` when they are compiled for a GPU."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _devices())


@cache
def _devices():
    torch = pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        return ["cpu"]
    return [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


_GUARD = 256  # elements on either side: keeps the 16-byte alignment that kernels are compiled for


def _poison(dtype):
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """torch.empty gives NaN (the largest integer, where there is no NaN) between guards that nobody may write to.

    So an element of an output or of scratch memory that a kernel leaves unwritten shows, and so does a store beyond it.
    """
    torch = pytest.importorskip("torch")
    empty, guarded = torch.empty, []

    def poisoned(*size, dtype=None, device=None, **_):
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        dtype = dtype or torch.get_default_dtype()
        if torch.device(device or "cpu").type == "meta":
            return empty(shape, dtype=dtype, device=device)
        flat = empty(shape.numel() + 2 * _GUARD, dtype=dtype, device=device).fill_(_poison(dtype))
        inside = empty(0, dtype=dtype, device=device)
        inside.set_(flat.untyped_storage(), _GUARD, shape, empty(shape, dtype=dtype, device="meta").stride())
        bits = flat.view(torch.uint8)
        edge = _GUARD * dtype.itemsize
        guarded.append((bits[:edge], bits[:edge].clone(), bits[-edge:], bits[-edge:].clone()))
        return inside

    def poisoned_like(x, dtype=None, device=None, **_):
        return poisoned(x.shape, dtype=dtype or x.dtype, device=device or x.device)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", poisoned_like)
    yield
    for before, as_before, after, as_after in guarded:
        assert torch.equal(before, as_before), "a kernel wrote before the start of its memory"
        assert torch.equal(after, as_after), "a kernel wrote beyond the end of its memory"
