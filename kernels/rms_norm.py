"""RMSNorm, both ways: one row in registers at a time, so bound by bandwidth (arXiv 1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.launch import as_fp32, check, narrow, persistent_programs, power_of_2, rowwise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_ROW = 65536


@rowwise()
@triton.jit
def _forward(x_ptr, weight_ptr, y_ptr, rstd_ptr, N, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = as_fp32(tl.load(x_ptr + row * N + n, mask=n < N, other=0.0))
    weight = as_fp32(tl.load(weight_ptr + n, mask=n < N, other=0.0))
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * N + n, narrow(x * rstd * weight, y_ptr.dtype.element_ty), mask=n < N)


@rowwise()
@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, rstd_ptr, dy_ptr, dx_ptr, dweight_ptr, M, N, BLOCK: tl.constexpr
):
    n = tl.arange(0, BLOCK)
    weight = as_fp32(tl.load(weight_ptr + n, mask=n < N, other=0.0))
    dweight = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * N + n
        unit = as_fp32(tl.load(x_ptr + at, mask=n < N, other=0.0)) * tl.load(rstd_ptr + row)
        dy = as_fp32(tl.load(dy_ptr + at, mask=n < N, other=0.0))
        dweight += dy * unit
        dunit = dy * weight
        dx = (dunit - unit * (tl.sum(dunit * unit, 0) / N)) * tl.load(rstd_ptr + row)
        tl.store(dx_ptr + at, narrow(dx, dx_ptr.dtype.element_ty), mask=n < N)
    tl.store(dweight_ptr + tl.program_id(0).to(tl.int64) * N + n, dweight, mask=n < N)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        (m, n), y = x.shape, torch.empty_like(x)
        rstd_M = torch.empty(m, dtype=torch.float32, device=x.device)
        if m:
            _forward[(m,)](x, weight, y, rstd_M, n, eps, BLOCK=power_of_2(n))
        ctx.save_for_backward(x, weight, rstd_M)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd_M = ctx.saved_tensors
        (m, n), dx = x.shape, torch.empty_like(x)
        if not m:
            return dx, torch.zeros_like(weight), None
        # each program sums its own rows; adding those sums up needs no atomics, so the result is the same every time
        programs = persistent_programs(x, m)
        dweight_PN = torch.empty((programs, n), dtype=torch.float32, device=x.device)
        _backward[(programs,)](x, weight, rstd_M, grads[0].contiguous(), dx, dweight_PN, m, n, BLOCK=power_of_2(n))
        return dx, dweight_PN.sum(0).to(weight.dtype), None


def rms_norm(x_MN: Tensor, weight_N: Tensor, eps: float = 1e-6) -> Tensor:
    """y = x / sqrt(mean(x²) + eps)∘weight, in fp32 inside; differentiable in x and weight.

    About 4·M·N FLOPs forward, 8·M·N backward. Moves (2·M·N + N)·itemsize bytes and 4·M of the rows' factors forward,
    3·M·N·itemsize and the sums of dweight, 8·N bytes a program, backward. Nothing is modified.
    x (M, N), N at most 65536, weight (N,) of the same dtype, bf16, fp16 or fp32, contiguous; else ValueError.
    """
    check("x", x_MN, dims=2, dtypes=DTYPES)
    n = x_MN.shape[1]
    if not 1 <= n <= LARGEST_ROW:
        raise ValueError(f"a row of x must have 1 to {LARGEST_ROW} elements; its shape is {tuple(x_MN.shape)}")
    check("weight", weight_N, shape=(n,), dtypes=(x_MN.dtype,), like=("x", x_MN))
    y: Tensor = _RmsNorm.apply(x_MN, weight_N, eps)  # type: ignore[no-untyped-call]
    return y


def reference(x_MN: Tensor, weight_N: Tensor, eps: float = 1e-6) -> Tensor:
    """The same in plain PyTorch."""
    return functional.rms_norm(x_MN, (x_MN.shape[1],), weight_N, eps)


def bytes_moved(x_MN: Tensor) -> int:
    """Bytes of forward: x and weight read, y and the rows' factors written."""
    m, n = x_MN.shape
    return (2 * m * n + n) * x_MN.element_size() + 4 * m
