"""Triad: STREAM's measure of memory bandwidth, two reads and one write of every element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ELEMENTWISE, as_fp32, check, configs, narrow

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.autotune(configs=configs(ELEMENTWISE, {"BLOCK": 64}), key=["n"])
@triton.jit
def _triad(a_ptr, b_ptr, out_ptr, scale, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    a = as_fp32(tl.load(a_ptr + offsets, mask=inside))
    b = as_fp32(tl.load(b_ptr + offsets, mask=inside))
    tl.store(out_ptr + offsets, narrow(a + scale * b, out_ptr.dtype.element_ty), mask=inside)


def triad(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """out = a + scale·b. 2·N FLOPs, in fp32; moves 3·N·itemsize bytes. Neither input is modified.

    a and b: one shape, bf16, fp16 or fp32, contiguous. ValueError when they are not.
    """
    check("a", a, dtypes=DTYPES)
    out = torch.empty_like(a)
    triad_into(out, a, b, scale)
    return out


def triad_into(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """out[:] = a + scale·b, for an `out` of the same shape and dtype; else as `triad`."""
    check("a", a, dtypes=DTYPES)
    for name, x in (("b", b), ("out", out)):
        check(name, x, shape=tuple(a.shape), dtypes=(a.dtype,), like=("a", a))
    n = a.numel()
    if n:
        _triad[lambda config: (triton.cdiv(n, config["BLOCK"]),)](a, b, out, scale, n)


def reference(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The same in plain PyTorch."""
    return torch.add(a, b, alpha=scale)


def bytes_moved(a: Tensor) -> int:
    """Bytes read and written: 3·N·itemsize."""
    return 3 * a.numel() * a.element_size()
