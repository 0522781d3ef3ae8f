"""Flash attention: softmax(scale·q·kᵀ)·v block by block, so that no score ever lies in memory (arXiv 2307.08691)."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import dot, head_case, keys_seen, load_rows, seen, store_rows
from kernels.flash_attention_backward import backward
from kernels.launch import LOG2_E, check, clean, configs, narrow, power_of_2
from kernels.standard_attention import standard_attention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256

# BM queries by BN keys, warps, stages; compiled.csv says which of them suit a GPU and a head, the last is for what it lacks
_TILES = (
    (128, 128, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (128, 32, 8, 2),
    (128, 64, 4, 2),
    (128, 32, 4, 3),
    (64, 64, 8, 2),
    (64, 32, 8, 2),
    (64, 64, 4, 2),
    (64, 32, 4, 2),
    (32, 32, 4, 1),
)
_CHOICES = [({"BM": bm, "BN": bn}, warps, stages) for bm, bn, warps, stages in _TILES]


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    acc,
    total,
    top,
    q,
    k_ptr,
    v_ptr,
    positions,
    scale2,
    SK,
    window,
    start,
    end,
    D: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds keys start to end: acc the weighted values, total the weights, top the largest score (all in powers of 2)."""
    for first in range(start, end, BN):
        n = first + tl.arange(0, BN)
        k = load_rows(k_ptr, n, SK, D, MASKED)
        scores = dot(q, tl.trans(k)) * scale2
        if MASKED:
            scores = tl.where(seen(positions[:, None], n[None, :], SK, window, CAUSAL, WINDOWED), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        reach = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top  # no key seen so far
        weights = tl.exp2(scores - reach[:, None])
        decay = tl.exp2(top - reach)
        v = load_rows(v_ptr, n, SK, DV, MASKED)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + dot(narrow(weights, v.dtype), v)
        top = new_top
    return acc, total, top


@triton.autotune(
    configs=configs(_CHOICES, {"BM": 16, "BN": 32}),
    key=["size", "D", "DV", "CAUSAL", "WINDOWED"],
    prune_configs_by=clean("flash_attention._forward", head_case),
)
@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    scale,
    GROUP,
    SQ,
    SK,
    window,
    size,
    D: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    # a head's blocks side by side, for they share its keys in L2; under a causal mask the last take longest: begin there
    blocks = tl.cdiv(SQ, BM)
    block = blocks - 1 - tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks).to(tl.int64)  # of all batches
    m = block * BM + tl.arange(0, BM)
    first = block * BM + SK - SQ  # the first query's position among the keys
    q = load_rows(q_ptr + head * SQ * D, m, SQ, D, True)
    k_ptr += head // GROUP * SK * D
    v_ptr += head // GROUP * SK * DV
    acc = tl.zeros((BM, BDV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    scale2 = scale * LOG2_E
    positions = m + SK - SQ
    start, full_start, full_end, end = keys_seen(first, BM, SK, window, BN, CAUSAL, WINDOWED)
    if WINDOWED:
        acc, total, top = _attend(
            acc, total, top, q, k_ptr, v_ptr, positions, scale2, SK, window, start, full_start,
            D, DV, BN, CAUSAL, WINDOWED, True,
        )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, k_ptr, v_ptr, positions, scale2, SK, window, full_start, full_end,
        D, DV, BN, CAUSAL, WINDOWED, False,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, k_ptr, v_ptr, positions, scale2, SK, window, full_end, end,
        D, DV, BN, CAUSAL, WINDOWED, True,
    )  # fmt: skip
    none = total == 0  # a query before the first key: zeros, and a logsumexp of -infinity
    safe = tl.where(none, 1.0, total)
    lse = tl.where(none, float("-inf"), (top + tl.log2(safe)) / LOG2_E)
    tl.store(lse_ptr + head * SQ + m, lse, mask=m < SQ)
    store_rows(out_ptr + head * SQ * DV, acc / safe[:, None], m, SQ, DV)


def forward(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) of attention, as `flash_attention`; logsumexp is (B, H, Sq) in fp32, natural logarithm."""
    _check(q_BHSD, k_BHSD, v_BHSD, causal, window)
    b, h, sq, d = q_BHSD.shape
    (_, hkv, sk, _), dv = k_BHSD.shape, v_BHSD.shape[-1]
    out_BHSD = torch.empty((b, h, sq, dv), dtype=q_BHSD.dtype, device=q_BHSD.device)
    lse_BHS = torch.empty((b, h, sq), dtype=torch.float32, device=q_BHSD.device)
    if out_BHSD.numel():

        def grid(config: dict[str, int]) -> tuple[int]:
            return (b * h * triton.cdiv(sq, config["BM"]),)

        _forward[grid](
            q_BHSD, k_BHSD, v_BHSD, out_BHSD, lse_BHS, 1 / math.sqrt(d) if scale is None else scale,
            h // hkv, sq, sk, window or 0, power_of_2(max(sq, sk)),
            D=d, DV=dv, BDV=power_of_2(dv, 16), CAUSAL=causal, WINDOWED=window is not None,
        )  # fmt: skip
    return out_BHSD, lse_BHS


class _FlashAttention(torch.autograd.Function):
    """Keeps q, k, v, out and the logsumexp; backward computes the scores again from them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None
    ) -> Tensor:
        out, lse = forward(q, k, v, causal=causal, window=window, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask = {"causal": causal, "window": window, "scale": scale}
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*backward(grads[0].contiguous(), *ctx.saved_tensors, **ctx.mask), None, None, None)


def flash_attention(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """out = softmax(scale·q·kᵀ)·v, (B, H, Sq, Dv), differentiable; scale is 1/√D unless given.

    q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), contiguous, in bf16, fp16 or fp32; Hkv divides H (GQA). With
    `causal` the last query meets the last key; `window` = w lets a query see the w latest keys up to its own. A query
    that sees no key gets zeros. Nothing is modified.

    FLOPs: 2·B·H·Sq·Sk·(D + Dv) forward and, of the gradient, 2.5 times as many (3.5 as run here, where two kernels
    compute the scores each); about half of them under a causal mask, whose hidden blocks are skipped. Moves q, k, v and
    out once, k and v again for each BM queries (from L2), and 4·B·H·Sq bytes of logsumexp; O(s) memory besides the output.
    ValueError for any other shape, dtype, layout or device.
    """
    out: Tensor = _FlashAttention.apply(q_BHSD, k_BHSD, v_BHSD, causal, window, scale)  # type: ignore[no-untyped-call]
    return out


def reference(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """The same in plain PyTorch, with all scores in memory."""
    return standard_attention(q_BHSD, k_BHSD, v_BHSD, causal=causal, window=window, scale=scale)


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> None:
    check("q", q, dims=4, dtypes=DTYPES)
    check("k", k, dims=4, dtypes=(q.dtype,), like=("q", q))
    check("v", v, dims=4, dtypes=(q.dtype,), like=("q", q))
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            "q, k and v must be (B, H, Sq, D), (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); "
            f"they are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"the heads of k ({k.shape[1]}) must divide the heads of q ({q.shape[1]})")
    for name, d in (("q and k", q.shape[3]), ("v", v.shape[3])):
        if not 1 <= d <= LARGEST_HEAD:
            raise ValueError(f"the head dimension of {name} must be 1 to {LARGEST_HEAD}; it is {d}")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"a window must be at least 1 and causal; window is {window}, causal {causal}")


def flops(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> int:
    """FLOPs of the whole forward, without regard to a mask: 2·B·H·Sq·Sk·(D + Dv)."""
    b, h, sq, d = q_BHSD.shape
    return 2 * b * h * sq * k_BHSD.shape[2] * (d + v_BHSD.shape[3])


def bytes_moved(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> int:
    """Bytes of forward when each of q, k, v, out and the logsumexp goes over the bus once."""
    b, h, sq, _ = q_BHSD.shape
    elements = q_BHSD.numel() + k_BHSD.numel() + v_BHSD.numel() + b * h * sq * v_BHSD.shape[3]
    return elements * q_BHSD.element_size() + 4 * b * h * sq
