"""Cross-entropy fused with its gradient: forward leaves the gradient where the logits were, so no third N·V tensor exists."""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.launch import LOG2_E, as_fp32, check, configs, narrow

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Reduction = Literal["mean", "sum"]

_CHOICES = [({"BLOCK": block}, warps, 2) for block, warps in ((2048, 4), (4096, 8), (8192, 8), (16384, 16))]
_EDGE = tl.constexpr(
    16
)  # elements: a row of an odd vocabulary begins at most so many before an address that wide loads can take


@triton.jit
def _scaled(ptr, offsets, mask, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits in powers of 2; -infinity where the mask is not."""
    x = tl.load(ptr + offsets, mask=mask, other=float("-inf")) if MASKED else tl.load(ptr + offsets)
    return as_fp32(x) * LOG2_E


@triton.jit
def _add(top, total, x):  # type: ignore[no-untyped-def]
    """The largest logit and the sum of exponentials so far, lane by lane."""
    new_top = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
    reach = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, total * tl.exp2(top - reach) + tl.exp2(x - reach)


@triton.jit
def _store_gradient(grad_ptr, offsets, x, v, target, reach, total, scale, counts, mask, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    grad = (tl.exp2(x - reach) / total - (v == target).to(tl.float32)) * scale
    grad = narrow(tl.where(counts, grad, 0.0), grad_ptr.dtype.element_ty)
    if MASKED:
        tl.store(grad_ptr + offsets, grad, mask=mask)
    else:
        tl.store(grad_ptr + offsets, grad)


@triton.autotune(configs=configs(_CHOICES, {"BLOCK": 32}), key=["V", "GRADIENT"], restore_value=["grad_ptr"])
@triton.jit
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits_ptr,
    target_ptr,
    loss_ptr,
    grad_ptr,
    count_ptr,
    V,
    ignore_index,
    MEAN: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    counts = target != ignore_index
    exists = (target >= 0) & (target < V)
    # Read before the sums below, at which all threads wait: afterwards the gradient may overwrite it.
    hit = as_fp32(tl.load(logits_ptr + row * V + target, mask=counts & exists, other=0.0))
    # The row is its edge, up to an aligned element, whole blocks without a mask, and the rest.
    head = tl.minimum(tl.cdiv(row * V, _EDGE) * _EDGE - row * V, V)
    body = tl.multiple_of(row * V + head, _EDGE)  # offset of the first whole block, whose first column is `head`
    whole = head + (V - head) // BLOCK * BLOCK
    edge = tl.arange(0, _EDGE)
    block = tl.arange(0, BLOCK)
    # first pass: the largest logit and the sum of exponentials, lane by lane, in powers of 2
    edge_x = _scaled(logits_ptr, row * V + edge, (edge < head) & counts, True)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if counts:
        for first in range(0, whole - head, BLOCK):
            top, total = _add(top, total, _scaled(logits_ptr, body + first + block, None, False))
        rest = whole + block
        top, total = _add(top, total, _scaled(logits_ptr, row * V + rest, rest < V, True))
    row_top = tl.maximum(tl.max(top, 0), tl.max(edge_x, 0))
    row_reach = tl.where(row_top == float("-inf"), 0.0, row_top)
    row_total = tl.sum(total * tl.exp2(top - row_reach), 0) + tl.sum(tl.exp2(edge_x - row_reach), 0)
    row_total = tl.where(counts, row_total, 1.0)
    loss = (tl.log2(row_total) + (row_reach - hit * LOG2_E)) / LOG2_E  # the large terms first: they cancel
    tl.store(loss_ptr + row, tl.where(counts, tl.where(exists, loss, float("nan")), 0.0))
    if GRADIENT:
        # second pass, mostly from L2: softmax, less 1 at the target
        scale = 1.0
        if MEAN:
            scale = 1.0 / tl.maximum(tl.load(count_ptr), 1).to(tl.float32)
        scale = tl.where(exists, scale, float("nan"))
        start = row * V
        _store_gradient(
            grad_ptr, start + edge, edge_x, edge, target, row_reach, row_total, scale, counts, edge < head, True
        )
        for first in range(0, whole - head, BLOCK):
            x = _scaled(logits_ptr, body + first + block, None, False)
            _store_gradient(
                grad_ptr,
                body + first + block,
                x,
                head + first + block,
                target,
                row_reach,
                row_total,
                scale,
                counts,
                None,
                False,
            )
        rest = whole + block
        last_x = _scaled(logits_ptr, start + rest, rest < V, True)
        _store_gradient(
            grad_ptr, start + rest, last_x, rest, target, row_reach, row_total, scale, counts, rest < V, True
        )


def loss_and_gradient(
    logits_NV: Tensor,
    target_N: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """(loss in fp32, its gradient with respect to the logits, in their dtype), as `cross_entropy`, without autograd."""
    grad_NV = logits_NV if inplace else torch.empty_like(logits_NV)
    return _launch(logits_NV, target_N, grad_NV, ignore_index, reduction), grad_NV


def _launch(logits: Tensor, target: Tensor, grad: Tensor | None, ignore_index: int, reduction: Reduction) -> Tensor:
    _check(logits, target, reduction)
    n, v = logits.shape
    count = (target != ignore_index).sum()  # stays on the device: nothing waits for it
    losses_N = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n:
        _cross_entropy[(n,)](
            logits, target, losses_N, logits if grad is None else grad, count, v, ignore_index,
            MEAN=reduction == "mean", GRADIENT=grad is not None,
        )  # fmt: skip
    loss = losses_N.sum()
    return loss / count if reduction == "mean" else loss


class _CrossEntropy(torch.autograd.Function):
    """Backward only multiplies the gradient that forward left behind."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, reduction: Reduction, inplace: bool
    ) -> Tensor:
        loss, ctx.grad = loss_and_gradient(
            logits.detach(), target, ignore_index=ignore_index, reduction=reduction, inplace=inplace
        )
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grad is None:
            raise RuntimeError("the gradient of cross_entropy has been used: its memory cannot serve a second backward")
        grad, ctx.grad = ctx.grad.mul_(grads[0]), None
        return grad, None, None, None, None


def cross_entropy(
    logits_NV: Tensor,
    target_N: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    inplace: bool = False,
) -> Tensor:
    """loss = mean or sum over the rows whose target is not `ignore_index` of log Σ exp(logits) - logits[target]; fp32.

    logits (N, V) in bf16, fp16 or fp32, target (N,) in int64 or int32, contiguous. Differentiable once: the gradient,
    softmax - onehot, is made in forward, with `inplace` in the memory of the logits, which are lost then (as no linear
    layer minds). A mean over no rows is NaN, as PyTorch's; a target outside [0, V) gives NaN rather than a read elsewhere.

    About 8·N·V FLOPs. Moves 3·N·V·itemsize bytes (logits read twice, the second time from L2 where a row fits; the
    gradient written), 1·N·V·itemsize without a gradient, and the backward's factor 2·N·V·itemsize more.
    ValueError for any other shape, dtype, layout, device or reduction.
    """
    if not (logits_NV.requires_grad and torch.is_grad_enabled()):
        return _launch(logits_NV, target_N, None, ignore_index, reduction)
    loss: Tensor = _CrossEntropy.apply(logits_NV, target_N, ignore_index, reduction, inplace)  # type: ignore[no-untyped-call]
    return loss


def _check(logits: Tensor, target: Tensor, reduction: Reduction) -> None:
    check("logits", logits, dims=2, dtypes=DTYPES)
    check("target", target, shape=(logits.shape[0],), dtypes=(torch.int64, torch.int32), like=("logits", logits))
    if not logits.shape[1]:
        raise ValueError(f"logits must have at least one column; their shape is {tuple(logits.shape)}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum; it is {reduction!r}")


def reference(
    logits_NV: Tensor, target_N: Tensor, *, ignore_index: int = -100, reduction: Reduction = "mean"
) -> Tensor:
    """The same in plain PyTorch, the logits widened to fp32 first, as transformers does."""
    logits = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return functional.cross_entropy(logits, target_N.long(), ignore_index=ignore_index, reduction=reduction)


def bytes_moved(logits_NV: Tensor) -> int:
    """Bytes of `loss_and_gradient`: the logits read, and the gradient written, once each, 2·N·V·itemsize.

    The second reading of the logits is L2's; a row that does not stay there costs N·V·itemsize more.
    """
    return 2 * logits_NV.numel() * logits_NV.element_size()
