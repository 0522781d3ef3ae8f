"""Rotary position embedding (arXiv 2104.09864), both ways, as Llama lays it out: x's first half turns with its second."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import as_fp32, check, configs, narrow, power_of_2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 1024

_CHOICES = [({"BM": bm}, warps, 1) for bm, warps in ((8, 2), (16, 4), (32, 4), (64, 4), (64, 8))]


@triton.autotune(configs=configs(_CHOICES, {"BM": 16}), key=["D", "HALF"])
@triton.jit
def _rope(  # type: ignore[no-untyped-def]
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    ROWS,
    S,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BHALF: tl.constexpr,
    BREST: tl.constexpr,
    BACK: tl.constexpr,
    BM: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, BHALF)
    inside = (rows[:, None] < ROWS) & (d[None, :] < HALF)
    at = rows[:, None] * D + d[None, :]
    angle = (rows % S)[:, None] * HALF + d[None, :]
    first = as_fp32(tl.load(x_ptr + at, mask=inside, other=0.0))
    second = as_fp32(tl.load(x_ptr + at + HALF, mask=inside, other=0.0))
    cos = as_fp32(tl.load(cos_ptr + angle, mask=inside, other=0.0))
    sin = as_fp32(tl.load(sin_ptr + angle, mask=inside, other=0.0))
    if BACK:  # the gradient turns the other way
        sin = -sin
    tl.store(out_ptr + at, narrow(first * cos - second * sin, out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + at + HALF, narrow(second * cos + first * sin, out_ptr.dtype.element_ty), mask=inside)
    if 2 * HALF < D:
        rest = 2 * HALF + tl.arange(0, BREST)
        passed = (rows[:, None] < ROWS) & (rest[None, :] < D)
        at = rows[:, None] * D + rest[None, :]
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=passed), mask=passed)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    b, h, s, d = x.shape
    half, rows = cos.shape[1], b * h * s
    out = torch.empty_like(x)
    if out.numel():
        _rope[lambda config: (triton.cdiv(rows, config["BM"]),)](
            x, cos, sin, out, rows, s,
            D=d, HALF=half, BHALF=power_of_2(half), BREST=power_of_2(d - 2 * half), BACK=back,
        )  # fmt: skip
    return out


class _Rope(torch.autograd.Function):
    """Keeps the angles only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0].contiguous(), cos, sin, back=True), None, None


def angles(positions_S: Tensor, half: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """(cos, sin), (S, half) in fp32, of position·base^(-i/half) for pair i, computed in float64."""
    exponents = torch.arange(half, dtype=torch.float64, device=positions_S.device) / half
    turn = positions_S.to(torch.float64)[:, None] * base**-exponents
    return turn.cos().float(), turn.sin().float()


def rope(x_BHSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Turns each pair (x_i, x_{i+R}) by its position's angle, i < R; elements from 2·R on pass. Differentiable in x.

    out_i = x_i·cos - x_{i+R}·sin, out_{i+R} = x_{i+R}·cos + x_i·sin, in fp32 inside: 6·B·H·S·R FLOPs either way. Moves
    2·B·H·S·D·itemsize bytes and the angles' 8·S·R (again for each head, from L2). x is not modified.
    x (B, H, S, D) in bf16, fp16 or fp32, D at most 1024; cos and sin (S, R) in fp32, R at most D/2, as `angles` gives them;
    contiguous, else ValueError.
    """
    check("x", x_BHSD, dims=4, dtypes=DTYPES)
    s, d = x_BHSD.shape[2:]
    check("cos", cos_SR, dims=2, dtypes=(torch.float32,), like=("x", x_BHSD))
    check("sin", sin_SR, shape=tuple(cos_SR.shape), dtypes=(torch.float32,), like=("x", x_BHSD))
    if d > LARGEST_HEAD:
        raise ValueError(f"the head dimension of x must be at most {LARGEST_HEAD}; it is {d}")
    if cos_SR.shape[0] != s or not 1 <= cos_SR.shape[1] <= d // 2:
        raise ValueError(
            f"cos must be ({s}, R) with R of 1 to {d // 2}, half of x's columns; it is {tuple(cos_SR.shape)}"
        )
    out: Tensor = _Rope.apply(x_BHSD, cos_SR, sin_SR)  # type: ignore[no-untyped-call]
    return out


def reference(x_BHSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """The same in plain PyTorch, with the angles in the dtype of x, as transformers does."""
    r = cos_SR.shape[1]
    cos, sin = (torch.cat([angle, angle], -1).to(x_BHSD.dtype) for angle in (cos_SR, sin_SR))
    turned, rest = x_BHSD[..., : 2 * r], x_BHSD[..., 2 * r :]
    half_turned = torch.cat([-turned[..., r:], turned[..., :r]], -1)
    return torch.cat([turned * cos + half_turned * sin, rest], -1)


def bytes_moved(x_BHSD: Tensor, cos_SR: Tensor) -> int:
    """Bytes of either way: x read, the result written, cos and sin read once."""
    return 2 * x_BHSD.nbytes + 2 * cos_SR.nbytes
