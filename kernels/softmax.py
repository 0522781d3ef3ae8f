"""Softmax over rows: a reduction and an exponential between one read and one write, so bound by bandwidth."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import LOG2_E, as_fp32, check, largest_row, narrow, power_of_2, rowwise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@rowwise()
@triton.jit
def _forward(x_ptr, y_ptr, N, BLOCK: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * N
    n = tl.arange(0, BLOCK)
    if WHOLE:  # the row stays in registers
        x = as_fp32(tl.load(x_ptr + row + n, mask=n < N, other=float("-inf")))
        weights = tl.exp2((x - tl.max(x, 0)) * LOG2_E)
        y = weights / tl.sum(weights, 0)
        tl.store(y_ptr + row + n, narrow(y, y_ptr.dtype.element_ty), mask=n < N)
    else:
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, N, BLOCK):
            x = as_fp32(tl.load(x_ptr + row + first + n, mask=first + n < N, other=float("-inf")))
            new_top = tl.maximum(top, x)
            reach = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing but -inf in this lane so far
            total = total * tl.exp2((top - reach) * LOG2_E) + tl.exp2((x - reach) * LOG2_E)
            top = new_top
        row_top = tl.max(top, 0)
        row_total = tl.sum(total * tl.exp2((top - row_top) * LOG2_E), 0)
        for first in range(0, N, BLOCK):
            x = as_fp32(tl.load(x_ptr + row + first + n, mask=first + n < N, other=float("-inf")))
            y = tl.exp2((x - row_top) * LOG2_E) / row_total
            tl.store(y_ptr + row + first + n, narrow(y, y_ptr.dtype.element_ty), mask=first + n < N)


@rowwise()
@triton.jit
def _backward(y_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * N
    n = tl.arange(0, BLOCK)
    if WHOLE:
        y = as_fp32(tl.load(y_ptr + row + n, mask=n < N, other=0.0))
        dy = as_fp32(tl.load(dy_ptr + row + n, mask=n < N, other=0.0))
        dx = y * (dy - tl.sum(y * dy, 0))
        tl.store(dx_ptr + row + n, narrow(dx, dx_ptr.dtype.element_ty), mask=n < N)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, N, BLOCK):
            y = as_fp32(tl.load(y_ptr + row + first + n, mask=first + n < N, other=0.0))
            total += y * as_fp32(tl.load(dy_ptr + row + first + n, mask=first + n < N, other=0.0))
        row_total = tl.sum(total, 0)
        for first in range(0, N, BLOCK):
            y = as_fp32(tl.load(y_ptr + row + first + n, mask=first + n < N, other=0.0))
            dy = as_fp32(tl.load(dy_ptr + row + first + n, mask=first + n < N, other=0.0))
            dx = y * (dy - row_total)
            tl.store(dx_ptr + row + first + n, narrow(dx, dx_ptr.dtype.element_ty), mask=first + n < N)


def _launch(kernel: Any, *rows: Tensor) -> Tensor:
    out = torch.empty_like(rows[0])
    if out.numel():
        m, n = out.shape
        block = min(power_of_2(n), largest_row())
        kernel[(m,)](*rows, out, n, BLOCK=block, WHOLE=block >= n)
    return out


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _launch(_forward, x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _launch(_backward, *ctx.saved_tensors, grads[0].contiguous())


def softmax(x_MN: Tensor) -> Tensor:
    """y = exp(x - max x) / Σ exp(x - max x) over each row, in fp32 inside; differentiable: dx = y∘(dy - Σ y∘dy).

    About 5·M·N FLOPs forward, 4·M·N backward. Moves 2·M·N·itemsize bytes forward, 3·M·N·itemsize backward (y kept); a row
    longer than 16384 is read twice, the second time mostly from L2. x is not modified: (M, N), bf16, fp16 or fp32,
    contiguous, else ValueError.
    """
    check("x", x_MN, dims=2, dtypes=DTYPES)
    y: Tensor = _Softmax.apply(x_MN)  # type: ignore[no-untyped-call]
    return y


def reference(x_MN: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return torch.softmax(x_MN, -1)


def bytes_moved(x_MN: Tensor) -> int:
    """Bytes of forward: 2·M·N·itemsize."""
    return 2 * x_MN.numel() * x_MN.element_size()
