"""Paged decode attention: one query a sequence over a KV cache in blocks, as servers keep it; bound by reading the cache."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import dot
from kernels.launch import LOG2_E, check, clean, configs, is_interpreted, narrow, power_of_2
from kernels.standard_attention import standard_attention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256
LARGEST_LATENT = 512
_SPLIT = 256  # fewest keys that are worth a program of their own
_PROGRAMS = 1024  # enough for several on each multiprocessor of a large GPU
_INTERPRETED_SPLIT = 32  # small, so that small tests cross splits too

# BH heads by BN keys at a time, warps, stages; compiled.csv says which of them suit a GPU and a head, the last is for what
# it lacks. Many heads that share a key (MLA) want a large BH: each tile of heads reads the keys anew.
_TILES = (
    (64, 64, 8, 3),
    (64, 32, 8, 3),
    (64, 64, 8, 2),
    (64, 32, 8, 2),
    (32, 64, 8, 3),
    (32, 32, 8, 3),
    (32, 32, 4, 3),
    (16, 128, 4, 3),
    (16, 128, 8, 3),
    (16, 64, 4, 5),
    (16, 64, 4, 3),
    (16, 64, 8, 3),
    (16, 32, 4, 5),
    (16, 32, 4, 3),
    (16, 16, 4, 1),
)
_CHOICES = [({"BH": bh, "BN": bn}, warps, stages) for bh, bn, warps, stages in _TILES]


def _case(given: dict[str, Any]) -> str:
    """The columns of the wider of a key's and a value's block, and of the key's tail."""
    tail = f"+{given['BTAIL']}" if given["TAIL"] else ""
    return f"{max(given['BD'], given['BDV'], 64)}{tail}"


def _filled(given: dict[str, Any]) -> bool:
    """Whether the group has heads for more than half of a tile."""
    return bool(given["BH"] <= power_of_2(given["GROUP"], 16))


@triton.autotune(
    configs=configs(_CHOICES, {"BH": 16, "BN": 16}),
    key=["GROUP", "D", "DV", "TAIL", "BLOCK"],
    prune_configs_by=clean("paged_decode._decode", _case, _filled),
)
@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    length_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    HKV,
    MAX_BLOCKS,
    NUM_BLOCKS,
    D: tl.constexpr,
    DV: tl.constexpr,
    TAIL: tl.constexpr,
    SHARED: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BTAIL: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
):
    # a key has D + TAIL elements; when it is SHARED (MLA) its first D are the value too, and are read once
    ROW: tl.constexpr = D + TAIL
    HEAD_TILES: tl.constexpr = (GROUP + BH - 1) // BH
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // HEAD_TILES
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    h = tl.program_id(1) % HEAD_TILES * BH + tl.arange(0, BH)
    head = (sequence * HKV + kv_head) * GROUP + h  # of all sequences
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    q_ptrs = q_ptr + head[:, None] * ROW
    q = tl.load(q_ptrs + d[None, :], mask=(h[:, None] < GROUP) & (d[None, :] < D), other=0.0)
    if TAIL:
        t = tl.arange(0, BTAIL)
        q_tail = tl.load(q_ptrs + D + t[None, :], mask=(h[:, None] < GROUP) & (t[None, :] < TAIL), other=0.0)

    length = tl.load(length_ptr + sequence)
    each = tl.cdiv(tl.cdiv(length, splits), BN) * BN
    start = split * each
    end = tl.minimum(start + each, length)
    acc = tl.zeros((BH, BDV), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    top = tl.full((BH,), float("-inf"), tl.float32)
    missing = start * 0  # 1 once a block does not exist
    for first in range(start, end, BN):
        n = first + tl.arange(0, BN)
        block = tl.load(
            table_ptr + sequence * MAX_BLOCKS + n // BLOCK, mask=(n < end) & (n // BLOCK < MAX_BLOCKS), other=-1
        )
        inside = (n < end) & (block >= 0) & (block < NUM_BLOCKS)  # a block that does not exist is not read
        row = (block.to(tl.int64) * BLOCK + n % BLOCK) * HKV + kv_head
        k = tl.load(k_ptr + row[:, None] * ROW + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0)
        scores = dot(q, tl.trans(k))
        if TAIL:
            k_tail = tl.load(
                k_ptr + row[:, None] * ROW + D + t[None, :], mask=inside[:, None] & (t[None, :] < TAIL), other=0.0
            )
            scores += dot(q_tail, tl.trans(k_tail))
        v_ptrs = v_ptr + row[:, None] * DV + dv[None, :]
        v = k if SHARED else tl.load(v_ptrs, mask=inside[:, None] & (dv[None, :] < DV), other=0.0)
        scores = tl.where(inside[None, :], scores * (scale * LOG2_E), float("-inf"))
        missing = tl.maximum(missing, tl.max((n < end).to(tl.int32) - inside.to(tl.int32), 0))
        new_top = tl.maximum(top, tl.max(scores, 1))
        reach = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - reach[:, None])
        decay = tl.exp2(top - reach)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + dot(narrow(weights, v.dtype), v)
        top = new_top
    none = total == 0  # a split beyond the sequence's end
    safe = tl.where(none, 1.0, total)
    at = head * splits + split
    tl.store(lse_ptr + at, tl.where(none, float("-inf"), top + tl.log2(safe)), mask=h < GROUP)
    tl.store(
        partial_ptr + at[:, None] * DV + dv[None, :],
        tl.where(missing == 1, float("nan"), acc / safe[:, None]),
        mask=(h[:, None] < GROUP) & (dv[None, :] < DV),
    )


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    partial_ptr, lse_ptr, out_ptr, SPLITS, DV: tl.constexpr, BDV: tl.constexpr, BSPLITS: tl.constexpr
):
    """One head's splits, each weighted by its share of the sum of exponentials."""
    head = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BSPLITS)
    dv = tl.arange(0, BDV)
    lse = tl.load(lse_ptr + head * SPLITS + s, mask=s < SPLITS, other=float("-inf"))
    top = tl.max(lse, 0)
    share = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(share, 0)
    acc = tl.zeros((BDV,), tl.float32)
    for split in range(SPLITS):
        weight = tl.sum(tl.where(s == split, share, 0.0), 0)
        part = tl.load(partial_ptr + (head * SPLITS + split) * DV + dv, mask=dv < DV, other=0.0)
        acc += weight * part
    out = acc / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + head * DV + dv, narrow(out, out_ptr.dtype.element_ty), mask=dv < DV)


def paged_decode(
    q_BHD: Tensor,
    k_cache_NTHD: Tensor,
    v_cache_NTHD: Tensor,
    block_table_BM: Tensor,
    lengths_B: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """out_b = softmax(scale·q_b·K_bᵀ)·V_b, (B, H, Dv), for one query of each sequence; scale is 1/√D unless given.

    q (B, H, D); the caches (N blocks, T tokens a block, Hkv, D or Dv) in the dtype of q, bf16, fp16 or fp32; Hkv divides
    H. block_table (B, M) and lengths (B,) are int32: token i of sequence b lies in block block_table[b, i // T] at i % T.
    Entries beyond a length are not read; a length of 0 gives zeros; a block that does not exist, or a length beyond the
    table, gives NaN for that sequence rather than a read outside the cache.

    With S the sum of the lengths: 2·S·H·(D + Dv) FLOPs; moves S·Hkv·(D + Dv)·itemsize bytes of cache, q and out. The keys
    of a sequence are split among programs, so that one long sequence fills the GPU; each split writes and reads
    4·B·H·(Dv + 1) bytes more. ValueError for any other shape, dtype, layout or device.
    """
    _check_query(q_BHD, block_table_BM, lengths_B)
    for name, cache in (("k_cache", k_cache_NTHD), ("v_cache", v_cache_NTHD)):
        check(name, cache, dims=4, dtypes=(q_BHD.dtype,), like=("q", q_BHD))
    h, d = q_BHD.shape[1:]
    if k_cache_NTHD.shape[:3] != v_cache_NTHD.shape[:3] or k_cache_NTHD.shape[3] != d:
        raise ValueError(
            f"k_cache and v_cache must be (N, T, Hkv, {d}) and (N, T, Hkv, Dv); "
            f"they are {tuple(k_cache_NTHD.shape)} and {tuple(v_cache_NTHD.shape)}"
        )
    hkv, dv = v_cache_NTHD.shape[2:]
    if not hkv or h % hkv:
        raise ValueError(f"the heads of k_cache ({hkv}) must divide the heads of q ({h})")
    for name, size in (("q and k_cache", d), ("v_cache", dv)):
        if not 1 <= size <= LARGEST_HEAD:
            raise ValueError(f"the head dimension of {name} must be 1 to {LARGEST_HEAD}; it is {size}")
    scale = 1 / math.sqrt(d) if scale is None else scale
    return _launch(q_BHD, k_cache_NTHD, v_cache_NTHD, block_table_BM, lengths_B, scale, tail=0)


def paged_decode_latent(
    q_BHR: Tensor,
    cache_NTR: Tensor,
    block_table_BM: Tensor,
    lengths_B: Tensor,
    *,
    value_dim: int,
    scale: float,
) -> Tensor:
    """Multi-head latent attention: all heads share one key of R elements a token, whose first `value_dim` are its value.

    q (B, H, R) already multiplied into the latent space; cache (N, T, R); out (B, H, value_dim) still in it. Else as
    `paged_decode`. 2·S·H·(R + value_dim) FLOPs; moves S·R·itemsize bytes of cache, each read once for both uses.
    """
    _check_query(q_BHR, block_table_BM, lengths_B)
    check("cache", cache_NTR, dims=3, dtypes=(q_BHR.dtype,), like=("q", q_BHR))
    r = q_BHR.shape[2]
    if cache_NTR.shape[2] != r:
        raise ValueError(f"cache must be (N, T, {r}), as q has {r} columns; it is {tuple(cache_NTR.shape)}")
    if not 1 <= value_dim <= min(r, LARGEST_LATENT):
        raise ValueError(f"value_dim must be 1 to {min(r, LARGEST_LATENT)}; it is {value_dim}")
    if r - value_dim > LARGEST_HEAD:
        raise ValueError(f"q may have {LARGEST_HEAD} columns beyond value_dim ({value_dim}); it has {r}")
    cache = cache_NTR.unsqueeze(2)
    return _launch(q_BHR, cache, cache, block_table_BM, lengths_B, scale, tail=r - value_dim, shared=True)


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    tail: int,
    shared: bool = False,
) -> Tensor:
    (b, h, row), (blocks, block, hkv, _) = q.shape, k_cache.shape
    d = row - tail
    dv = d if shared else v_cache.shape[3]
    out = torch.empty((b, h, dv), dtype=q.dtype, device=q.device)
    if not (out.numel() and k_cache.numel() and table.numel()):
        return out.zero_()
    group = h // hkv
    splits = _splits(b * hkv * triton.cdiv(group, 64), table.shape[1] * block)
    partial = torch.empty((b, h, splits, dv), dtype=torch.float32, device=q.device)
    lse = torch.empty((b, h, splits), dtype=torch.float32, device=q.device)
    _decode[lambda config: (b, hkv * triton.cdiv(group, config["BH"]), splits)](
        q, k_cache, v_cache, table, lengths, partial, lse, scale, hkv, table.shape[1], blocks,
        D=d, DV=dv, TAIL=tail, SHARED=shared, BD=power_of_2(d, 16), BDV=power_of_2(dv, 16), BTAIL=power_of_2(tail, 16),
        GROUP=group, BLOCK=block,
    )  # fmt: skip
    _join[(b * h,)](partial, lse, out, splits, DV=dv, BDV=power_of_2(dv), BSPLITS=power_of_2(splits))
    return out


def _splits(programs: int, longest: int) -> int:
    """Into how many parts the keys go: none shorter than _SPLIT, and no more than fill a large GPU."""
    least = _INTERPRETED_SPLIT if is_interpreted() else _SPLIT
    return max(1, min(-(-longest // least), _PROGRAMS // programs))


def _check_query(q: Tensor, table: Tensor, lengths: Tensor) -> None:
    check("q", q, dims=3, dtypes=DTYPES)
    check("block_table", table, dims=2, dtypes=(torch.int32,), like=("q", q))
    check("lengths", lengths, shape=(q.shape[0],), dtypes=(torch.int32,), like=("q", q))
    if table.shape[0] != q.shape[0]:
        raise ValueError(f"block_table must have {q.shape[0]} rows, as q has sequences; it is {tuple(table.shape)}")


def gather(cache_NTHD: Tensor, blocks_M: Tensor, length: int) -> Tensor:
    """(1, Hkv, length, D): one sequence's rows of the cache, side by side."""
    needed = blocks_M[: triton.cdiv(length, cache_NTHD.shape[1])].long()
    return cache_NTHD[needed].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)


def reference(
    q_BHD: Tensor,
    k_cache_NTHD: Tensor,
    v_cache_NTHD: Tensor,
    block_table_BM: Tensor,
    lengths_B: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """The same in plain PyTorch, a sequence at a time."""
    outs = []
    for q_HD, blocks_M, length in zip(q_BHD, block_table_BM, lengths_B.tolist(), strict=True):
        k, v = (gather(cache, blocks_M, length) for cache in (k_cache_NTHD, v_cache_NTHD))
        outs.append(standard_attention(q_HD[None, :, None], k, v, scale=scale)[0, :, 0])
    return torch.stack(outs)


def reference_latent(
    q_BHR: Tensor,
    cache_NTR: Tensor,
    block_table_BM: Tensor,
    lengths_B: Tensor,
    *,
    value_dim: int,
    scale: float,
) -> Tensor:
    """The same as `paged_decode_latent` in plain PyTorch: one head of keys, whose first columns are the values."""
    cache = cache_NTR.unsqueeze(2)
    return reference(q_BHR, cache, cache[..., :value_dim], block_table_BM, lengths_B, scale=scale)


def flops(tokens: int, num_attention_heads: int, key_dim: int, value_dim: int) -> int:
    """FLOPs over `tokens` cached tokens of all sequences together: 2·S·H·(D + Dv)."""
    return 2 * tokens * num_attention_heads * (key_dim + value_dim)


def bytes_moved(tokens: int, bytes_per_token: int, q_BHD: Tensor, out_BHD: Tensor) -> int:
    """Bytes of the cache's rows (Hkv·(D + Dv)·itemsize a token; R·itemsize for latents), of q and of out, once each."""
    return tokens * bytes_per_token + sum(x.numel() * x.element_size() for x in (q_BHD, out_BHD))
