"""The gradient of flash attention.

With P the probabilities and dP = dout·vᵀ: dv = Pᵀ·dout, dS = P∘(dP - delta), delta = rowsum(dout∘out), dq = scale·dS·k,
dk = scale·dSᵀ·q. P comes from the saved logsumexp. One kernel holds a block of keys and goes over the queries (of all
heads that share the keys, so nothing is added atomically), a second holds a block of queries and goes over the keys.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import dot, head_case, keys_seen, load_rows, seen, store_rows
from kernels.launch import LOG2_E, as_fp32, check, clean, configs, narrow, power_of_2

# BM queries by BN keys, warps, stages; compiled.csv says which of them suit a GPU and a head, the last is for what it lacks
_KEY_TILES = (
    (64, 128, 8, 2),
    (32, 128, 8, 2),
    (64, 64, 8, 2),
    (32, 64, 8, 2),
    (32, 64, 8, 1),
    (16, 64, 8, 1),
    (32, 64, 4, 2),
    (32, 64, 4, 1),
    (16, 64, 4, 1),
    (32, 32, 4, 2),
    (16, 32, 4, 1),
    (16, 16, 4, 1),
)
_QUERY_TILES = (
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (128, 32, 8, 2),
    (64, 64, 4, 2),
    (64, 32, 8, 2),
    (64, 32, 8, 1),
    (64, 32, 4, 2),
    (64, 32, 4, 1),
    (32, 32, 4, 1),
    (32, 16, 4, 1),
)


@triton.jit
def _delta(out_ptr, dout_ptr, delta_ptr, ROWS, DV: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    out = as_fp32(load_rows(out_ptr, rows, ROWS, DV, True))
    dout = as_fp32(load_rows(dout_ptr, rows, ROWS, DV, True))
    tl.store(delta_ptr + rows, tl.sum(out * dout, 1), mask=rows < ROWS)


@triton.jit
def _load_lse2(lse_ptr, m, SQ):  # type: ignore[no-untyped-def]
    """The logsumexp in powers of 2; infinite, so that every probability is 0, for queries beyond the edge or unsighted."""
    lse = tl.load(lse_ptr + m, mask=m < SQ, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit
def _add_queries(  # type: ignore[no-untyped-def]
    dk,
    dv,
    k,
    v,
    q_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    keys,
    scale2,
    SQ,
    SK,
    window,
    start,
    end,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds what queries start to end give to dk (without the scale) and dv. Scores are held transposed, keys by queries."""
    for first in range(start, end, BM):
        m = first + tl.arange(0, BM)
        q = load_rows(q_ptr, m, SQ, D, MASKED)
        dout = load_rows(dout_ptr, m, SQ, DV, MASKED)
        scores = dot(k, tl.trans(q)) * scale2
        if MASKED:
            mask = seen((m + SK - SQ)[None, :], keys[:, None], SK, window, CAUSAL, WINDOWED)
            scores = tl.where(mask, scores, float("-inf"))
        p = tl.exp2(scores - _load_lse2(lse_ptr, m, SQ)[None, :])
        dv += dot(narrow(p, dout.dtype), dout)
        dp = dot(v, tl.trans(dout))
        ds = p * (dp - tl.load(delta_ptr + m, mask=m < SQ, other=0.0)[None, :])
        dk += dot(narrow(ds, q.dtype), q)
    return dk, dv


@triton.autotune(
    configs=configs([({"BM": m, "BN": n}, warps, stages) for m, n, warps, stages in _KEY_TILES], {"BM": 16, "BN": 32}),
    key=["size", "D", "DV", "CAUSAL", "WINDOWED"],
    prune_configs_by=clean("flash_attention_backward._keys", head_case),
)
@triton.jit
def _keys(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    scale,
    GROUP,
    SQ,
    SK,
    window,
    size,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    blocks = tl.cdiv(SK, BN)
    kv_head = (tl.program_id(0) // blocks).to(tl.int64)  # of all batches
    first = tl.program_id(0) % blocks * BN
    n = first + tl.arange(0, BN)
    k = load_rows(k_ptr + kv_head * SK * D, n, SK, D, True)
    v = load_rows(v_ptr + kv_head * SK * DV, n, SK, DV, True)
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BDV), tl.float32)
    scale2 = scale * LOG2_E
    # queries that see any of these keys, start to end, and those that see all of them, full_start to full_end
    start = 0
    end = SQ
    full_start = 0
    full_end = SQ
    if CAUSAL:
        start = tl.maximum(first + SQ - SK, 0) // BM * BM
        full_start = tl.cdiv(tl.maximum(first + BN - 1 + SQ - SK, 0), BM) * BM
    if WINDOWED:
        end = tl.minimum(SQ, tl.maximum(first + BN - 1 + window + SQ - SK, 0))
        full_end = tl.minimum(SQ, tl.maximum(first + window + SQ - SK, 0))
    full_end = tl.maximum(full_end // BM * BM, start)
    full_start = tl.minimum(full_start, full_end)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        q, dout, lse, delta = (
            q_ptr + head * SQ * D,
            dout_ptr + head * SQ * DV,
            lse_ptr + head * SQ,
            delta_ptr + head * SQ,
        )
        if CAUSAL:
            dk, dv = _add_queries(
                dk, dv, k, v, q, dout, lse, delta, n, scale2, SQ, SK, window, start, full_start,
                D, DV, BM, CAUSAL, WINDOWED, True,
            )  # fmt: skip
        dk, dv = _add_queries(
            dk, dv, k, v, q, dout, lse, delta, n, scale2, SQ, SK, window, full_start, full_end,
            D, DV, BM, CAUSAL, WINDOWED, False,
        )  # fmt: skip
        dk, dv = _add_queries(
            dk, dv, k, v, q, dout, lse, delta, n, scale2, SQ, SK, window, full_end, end,
            D, DV, BM, CAUSAL, WINDOWED, True,
        )  # fmt: skip
    store_rows(dk_ptr + kv_head * SK * D, dk * scale, n, SK, D)
    store_rows(dv_ptr + kv_head * SK * DV, dv, n, SK, DV)


@triton.jit
def _add_keys(  # type: ignore[no-untyped-def]
    dq,
    q,
    dout,
    lse2,
    delta,
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
    """Adds what keys start to end give to dq (without the scale)."""
    for first in range(start, end, BN):
        n = first + tl.arange(0, BN)
        k = load_rows(k_ptr, n, SK, D, MASKED)
        v = load_rows(v_ptr, n, SK, DV, MASKED)
        scores = dot(q, tl.trans(k)) * scale2
        if MASKED:
            scores = tl.where(seen(positions[:, None], n[None, :], SK, window, CAUSAL, WINDOWED), scores, float("-inf"))
        p = tl.exp2(scores - lse2[:, None])
        ds = p * (dot(dout, tl.trans(v)) - delta[:, None])
        dq += dot(narrow(ds, k.dtype), k)
    return dq


@triton.autotune(
    configs=configs(
        [({"BM": m, "BN": n}, warps, stages) for m, n, warps, stages in _QUERY_TILES], {"BM": 16, "BN": 32}
    ),
    key=["size", "D", "DV", "CAUSAL", "WINDOWED"],
    prune_configs_by=clean("flash_attention_backward._queries", head_case),
)
@triton.jit
def _queries(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    scale,
    GROUP,
    SQ,
    SK,
    window,
    size,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    blocks = tl.cdiv(SQ, BM)
    block = blocks - 1 - tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks).to(tl.int64)
    m = block * BM + tl.arange(0, BM)
    q = load_rows(q_ptr + head * SQ * D, m, SQ, D, True)
    dout = load_rows(dout_ptr + head * SQ * DV, m, SQ, DV, True)
    lse2 = _load_lse2(lse_ptr + head * SQ, m, SQ)
    delta = tl.load(delta_ptr + head * SQ + m, mask=m < SQ, other=0.0)
    k_ptr += head // GROUP * SK * D
    v_ptr += head // GROUP * SK * DV
    dq = tl.zeros((BM, BD), tl.float32)
    scale2 = scale * LOG2_E
    positions = m + SK - SQ
    start, full_start, full_end, end = keys_seen(block * BM + SK - SQ, BM, SK, window, BN, CAUSAL, WINDOWED)
    if WINDOWED:
        dq = _add_keys(
            dq, q, dout, lse2, delta, k_ptr, v_ptr, positions, scale2, SK, window, start, full_start,
            D, DV, BN, CAUSAL, WINDOWED, True,
        )  # fmt: skip
    dq = _add_keys(
        dq, q, dout, lse2, delta, k_ptr, v_ptr, positions, scale2, SK, window, full_start, full_end,
        D, DV, BN, CAUSAL, WINDOWED, False,
    )  # fmt: skip
    dq = _add_keys(
        dq, q, dout, lse2, delta, k_ptr, v_ptr, positions, scale2, SK, window, full_end, end,
        D, DV, BN, CAUSAL, WINDOWED, True,
    )  # fmt: skip
    store_rows(dq_ptr + head * SQ * D, dq * scale, m, SQ, D)


def backward(
    dout_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `flash_attention.forward`, from its inputs, its results and the gradient of out.

    7·B·H·Sq·Sk·(D + Dv) FLOPs as run (five products, two of them twice), 5 if none were repeated, half under a causal
    mask. Moves q, k, v, out and dout in, dq, dk and dv out, and 8·B·H·Sq bytes of row sums. ValueError when dout does not
    match out.
    """
    check("dout", dout_BHSD, shape=tuple(out_BHSD.shape), dtypes=(q_BHSD.dtype,), like=("q", q_BHSD))
    b, h, sq, d = q_BHSD.shape
    (_, hkv, sk, _), dv = k_BHSD.shape, v_BHSD.shape[-1]
    dq, dk, dv_BHSD = (torch.empty_like(x) for x in (q_BHSD, k_BHSD, v_BHSD))
    if not (q_BHSD.numel() and k_BHSD.numel()):
        return dq.zero_(), dk.zero_(), dv_BHSD.zero_()
    delta_BHS = torch.empty_like(lse_BHS)
    _delta[(triton.cdiv(b * h * sq, 16),)](out_BHSD, dout_BHSD, delta_BHS, b * h * sq, DV=dv, BM=16)
    given = (q_BHSD, k_BHSD, v_BHSD, dout_BHSD, lse_BHS, delta_BHS)
    sizes = (1 / math.sqrt(d) if scale is None else scale, h // hkv, sq, sk, window or 0, power_of_2(max(sq, sk)))
    blocks = {"D": d, "DV": dv, "BD": power_of_2(d, 16), "CAUSAL": causal, "WINDOWED": window is not None}
    _keys[lambda config: (b * hkv * triton.cdiv(sk, config["BN"]),)](
        *given, dk, dv_BHSD, *sizes, BDV=power_of_2(dv, 16), **blocks
    )
    _queries[lambda config: (b * h * triton.cdiv(sq, config["BM"]),)](*given, dq, *sizes, **blocks)
    return dq, dk, dv_BHSD
