"""Absmax int8: each row becomes integers of -127 to 127 and one scale, the row's largest magnitude over 127."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ELEMENTWISE, as_fp32, check, configs, largest_row, narrow, power_of_2, rowwise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def to_int8(x, scale):  # type: ignore[no-untyped-def]
    """x / scale as int8, ties to even; 0 where the scale is 0."""
    ratio = tl.div_rn(x, tl.where(scale == 0, 1.0, scale))
    return ((ratio + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5·2**23: fp32 has no room for a fraction there


@rowwise()
@triton.jit
def _quantize(x_ptr, q_ptr, scale_ptr, N, BLOCK: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    if WHOLE:  # the row stays in registers
        x = as_fp32(tl.load(x_ptr + row * N + n, mask=n < N, other=0.0))
        scale = tl.div_rn(tl.max(tl.abs(x), 0), 127.0)
        tl.store(q_ptr + row * N + n, to_int8(x, scale), mask=n < N)
    else:
        top = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, N, BLOCK):
            x = as_fp32(tl.load(x_ptr + row * N + first + n, mask=first + n < N, other=0.0))
            top = tl.maximum(top, tl.abs(x))
        scale = tl.div_rn(tl.max(top, 0), 127.0)
        for first in range(0, N, BLOCK):
            x = as_fp32(tl.load(x_ptr + row * N + first + n, mask=first + n < N, other=0.0))
            tl.store(q_ptr + row * N + first + n, to_int8(x, scale), mask=first + n < N)
    tl.store(scale_ptr + row, scale)


@triton.autotune(configs=configs(ELEMENTWISE, {"BLOCK": 64}), key=["N"])
@triton.jit
def _dequantize(q_ptr, scale_ptr, x_ptr, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(q_ptr + row * N + n, mask=n < N, other=0)
    x = q.to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(x_ptr + row * N + n, narrow(x, x_ptr.dtype.element_ty), mask=n < N)


def quantize_int8(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    """(q_MN int8, scale_M fp32): scale = max|x| / 127 of the row, q = round(x / scale), so |x - q·scale| <= max|x| / 254.

    About 3·M·N FLOPs; moves M·N·(itemsize + 1) + 4·M bytes (a row longer than 16384 is read twice, mostly from L2). x is
    not modified: (M, N), bf16, fp16 or fp32, contiguous, else ValueError; finite, which is not checked.
    """
    check("x", x_MN, dims=2, dtypes=DTYPES)
    m, n = x_MN.shape
    q_MN = torch.empty((m, n), dtype=torch.int8, device=x_MN.device)
    if not n:
        return q_MN, torch.zeros(m, dtype=torch.float32, device=x_MN.device)
    scale_M = torch.empty(m, dtype=torch.float32, device=x_MN.device)
    if m:
        block = min(power_of_2(n), largest_row())
        _quantize[(m,)](x_MN, q_MN, scale_M, n, BLOCK=block, WHOLE=block >= n)
    return q_MN, scale_M


def dequantize_int8(q_MN: Tensor, scale_M: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x_MN = q·scale of its row, in bf16, fp16 or fp32. M·N FLOPs; moves M·N·(1 + itemsize) + 4·M bytes."""
    check("q", q_MN, dims=2, dtypes=(torch.int8,))
    check("scale", scale_M, shape=(q_MN.shape[0],), dtypes=(torch.float32,), like=("q", q_MN))
    m, n = q_MN.shape
    x_MN = torch.empty((m, n), dtype=dtype, device=q_MN.device)
    check("the result", x_MN, dtypes=DTYPES)
    if x_MN.numel():
        _dequantize[lambda config: (m * triton.cdiv(n, config["BLOCK"]),)](q_MN, scale_M, x_MN, n)
    return x_MN


def reference(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_int8` in plain PyTorch."""
    x = x_MN.float()
    if not x.shape[1]:
        return x.to(torch.int8), x.new_zeros(x.shape[0])
    scale_M = x.abs().amax(1) / 127
    divisor = torch.where(scale_M == 0, 1.0, scale_M)
    return (x / divisor[:, None]).round().to(torch.int8), scale_M


def reference_dequantize(q_MN: Tensor, scale_M: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`dequantize_int8` in plain PyTorch."""
    return (q_MN.to(scale_M.dtype) * scale_M[:, None]).to(dtype)


def bytes_moved(x_MN: Tensor) -> int:
    """Bytes of quantising x, and of dequantising to its dtype: M·N·(itemsize + 1) + 4·M."""
    return x_MN.numel() * (x_MN.element_size() + 1) + 4 * x_MN.shape[0]
