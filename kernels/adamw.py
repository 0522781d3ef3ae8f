"""Fused AdamW (arXiv 1711.05101): one pass over parameter, gradient and both moments, in place, bound by bandwidth."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ELEMENTWISE, as_fp32, check, configs, narrow

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# tuned once for each set of dtypes, whatever the length; each try is undone, as it works in place
@triton.autotune(
    configs=configs(ELEMENTWISE, {"BLOCK": 64}), key=[], restore_value=["param_ptr", "first_ptr", "second_ptr"]
)
@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    param_ptr,
    grad_ptr,
    first_ptr,
    second_ptr,
    keep,
    decay1,
    decay2,
    step_size,
    root_correction2,
    eps,
    n,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    param = as_fp32(tl.load(param_ptr + offsets, mask=inside, other=0.0)) * keep
    grad = as_fp32(tl.load(grad_ptr + offsets, mask=inside, other=0.0))
    first = as_fp32(tl.load(first_ptr + offsets, mask=inside, other=0.0))
    second = as_fp32(tl.load(second_ptr + offsets, mask=inside, other=0.0))
    first = decay1 * first + (1.0 - decay1) * grad
    second = decay2 * second + (1.0 - decay2) * grad * grad
    param -= step_size * first / (tl.sqrt(second) / root_correction2 + eps)
    tl.store(param_ptr + offsets, narrow(param, param_ptr.dtype.element_ty), mask=inside)
    tl.store(first_ptr + offsets, narrow(first, first_ptr.dtype.element_ty), mask=inside)
    tl.store(second_ptr + offsets, narrow(second, second_ptr.dtype.element_ty), mask=inside)


def adamw(
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """Step number `step` (from 1) of torch.optim.AdamW on one tensor, in place: param and the moments first and second.

    first ← β₁·first + (1-β₁)·grad; second ← β₂·second + (1-β₂)·grad²; param ← (1-lr·λ)·param
    - lr/(1-β₁ˢ)·first / (√second/√(1-β₂ˢ) + ε), in fp32 inside. About 14·N FLOPs; moves N times the bytes of grad once and
    of param, first and second twice: 28 bytes an element in fp32, 14 in 16 bits.
    One shape, contiguous; bf16, fp16 or fp32 each (the moments may be fp32 where param is not). ValueError otherwise.
    """
    _check(param, grad, first, second, step, betas)
    n = param.numel()
    if n:
        _adamw[lambda config: (triton.cdiv(n, config["BLOCK"]),)](
            param, grad, first, second, 1 - lr * weight_decay, *betas,
            lr / (1 - betas[0] ** step), math.sqrt(1 - betas[1] ** step), eps, n,
        )  # fmt: skip


def _check(param: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: int, betas: tuple[float, float]) -> None:
    check("param", param, dtypes=DTYPES)
    for name, x in (("grad", grad), ("first", first), ("second", second)):
        check(name, x, shape=tuple(param.shape), dtypes=DTYPES, like=("param", param))
    if step < 1:
        raise ValueError(f"step must be at least 1; it is {step}")
    for name, beta in zip(("the first", "the second"), betas, strict=True):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} of betas must be at least 0 and below 1; it is {beta}")


def reference(
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """The same in plain PyTorch, which rounds to the tensors' dtypes after each operation, as its foreach AdamW does."""
    param.mul_(1 - lr * weight_decay)
    first.lerp_(grad.to(first.dtype), 1 - betas[0])
    second.mul_(betas[1]).addcmul_(grad.to(second.dtype), grad.to(second.dtype), value=1 - betas[1])
    divisor = second.sqrt().div_(math.sqrt(1 - betas[1] ** step)).add_(eps)
    param.sub_((first / divisor * (lr / (1 - betas[0] ** step))).to(param.dtype))


def bytes_moved(param: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> int:
    """Bytes: the gradient read, the parameter and both moments read and written."""
    return grad.nbytes + 2 * (param.nbytes + first.nbytes + second.nbytes)
