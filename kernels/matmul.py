"""Matrix multiplication: the plainest use of the tensor cores, 2·M·N·K FLOPs on M·K + K·N + M·N elements."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import check, clean, configs, names, narrow, power_of_2, widen

# dtype of both operands -> dtypes of the product, the first by default
OUTPUTS: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float16: (torch.float16, torch.float32),
    torch.float8_e4m3fn: (torch.bfloat16, torch.float16, torch.float32),
    torch.int8: (torch.int32,),
}
# compute capability from which Triton multiplies the dtype on NVIDIA's tensor cores
CAPABILITY = {torch.bfloat16: (8, 0), torch.int8: (8, 0), torch.float8_e4m3fn: (8, 9)}

# BM, BN, BK, warps, stages; compiled.csv says which of them suit a GPU and a dtype, the last is for what it lacks
_TILES = (
    (128, 256, 64, 8, 4),
    (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 3),
    (128, 256, 128, 8, 3),
    (256, 128, 128, 8, 3),
    (128, 128, 128, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 64, 4, 3),
    (128, 128, 32, 4, 4),
    (128, 128, 64, 8, 2),
    (128, 64, 64, 4, 3),
    (64, 128, 64, 4, 3),
    (64, 64, 64, 4, 4),
    (64, 32, 128, 4, 3),
    (32, 64, 128, 4, 3),  # few rows
    (16, 64, 128, 4, 4),
)
_CHOICES = [({"BM": bm, "BN": bn, "BK": bk, "GROUP": 8}, warps, stages) for bm, bn, bk, warps, stages in _TILES]


def _case(given: dict[str, Any]) -> str:
    """The operands' dtype; fp16 compiles as bf16 does."""
    dtype = given["a_ptr"].dtype
    return names([torch.bfloat16 if dtype == torch.float16 else dtype])


@triton.autotune(
    configs=configs(_CHOICES, {"BM": 16, "BN": 32, "BK": 16, "GROUP": 2}),
    key=["size", "N", "K", "b_stride_k"],
    prune_configs_by=clean("matmul._matmul", _case),
)
@triton.heuristics({"EVEN_K": lambda given: given["K"] % given["BK"] == 0})
@triton.jit
def _matmul(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    K,
    b_stride_k,
    b_stride_n,
    size,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    # GROUP rows of tiles at a time, so that the tiles of b that they share are still in L2
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    program = tl.program_id(0)
    first_m = program // (GROUP * tiles_n) * GROUP
    rows = min(tiles_m - first_m, GROUP)
    within = program % (GROUP * tiles_n)
    start_m = (first_m + within % rows) * BM
    start_n = (within // rows) * BN

    # rows and columns beyond the edge read row 0's neighbours again rather than under a mask; they are not stored
    m = ((start_m + tl.arange(0, BM)) % M).to(tl.int64)
    n = ((start_n + tl.arange(0, BN)) % N).to(tl.int64)
    k = tl.arange(0, BK)
    a_ptrs = a_ptr + m[:, None] * K + k[None, :]
    b_ptrs = b_ptr + k[:, None].to(tl.int64) * b_stride_k + n[None, :] * b_stride_n
    INTEGER: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    FP8: tl.constexpr = a_ptr.dtype.element_ty == tl.float8e4nv
    acc = tl.zeros((BM, BN), tl.int32 if INTEGER else tl.float32)
    for start_k in range(0, K, BK):
        if EVEN_K:
            a, b = tl.load(a_ptrs), tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=k[None, :] < K - start_k, other=0.0)
            b = tl.load(b_ptrs, mask=k[:, None] < K - start_k, other=0.0)
        if INTEGER:
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        elif FP8:
            # Hopper adds fp8 products in 14 bits: carry each block over to fp32
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BK)
        else:
            acc = tl.dot(widen(a), widen(b), acc)
        a_ptrs += BK
        b_ptrs += BK * b_stride_k
    m = start_m + tl.arange(0, BM)
    n = start_n + tl.arange(0, BN)
    out_ptrs = out_ptr + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out_ptrs, narrow(acc, out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def matmul(a_MK: Tensor, b_KN: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """out_MN = a · b. 2·M·N·K FLOPs; moves at least (M·K + K·N)·itemsize + M·N·(itemsize of out) bytes.

    Both in bf16 or fp16 (the product in the same, or fp32), in fp8 e4m3 (bf16, fp16 or fp32) or in int8 (int32,
    exact); sums are fp32 or int32. a is contiguous; b is, or is the transpose of a contiguous matrix, as a linear
    layer's weight is. Neither is modified. ValueError for any other shape, dtype, layout or device.
    """
    out_dtype = _check(a_MK, b_KN, out_dtype)
    (m, k), n = a_MK.shape, b_KN.shape[1]
    if k == 0:
        return torch.zeros((m, n), dtype=out_dtype, device=a_MK.device)
    out_MN = torch.empty((m, n), dtype=out_dtype, device=a_MK.device)
    if out_MN.numel():

        def grid(config: dict[str, int]) -> tuple[int]:
            return (triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"]),)

        _matmul[grid](a_MK, b_KN, out_MN, m, n, k, b_KN.stride(0), b_KN.stride(1), power_of_2(m))
    return out_MN


def _check(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    check("a", a, dims=2, dtypes=tuple(OUTPUTS))
    if b.dim() != 2 or b.shape[0] != a.shape[1]:
        raise ValueError(f"b must have as many rows as a has columns; a is {tuple(a.shape)}, b {tuple(b.shape)}")
    check("b", b if b.is_contiguous() else b.t(), dtypes=(a.dtype,), like=("a", a))
    if a.device.type == "cuda" and torch.version.hip is None:
        check_capability(a.dtype, torch.cuda.get_device_capability(a.device))
    allowed = OUTPUTS[a.dtype]
    out_dtype = out_dtype or allowed[0]
    if out_dtype not in allowed:
        raise ValueError(
            f"the product of {names([a.dtype])} must be one of {names(allowed)}; out_dtype is {names([out_dtype])}"
        )
    return out_dtype


def check_capability(dtype: torch.dtype, found: tuple[int, int]) -> None:
    """ValueError when an NVIDIA GPU of the compute capability `found` does not multiply the dtype."""
    needed = CAPABILITY.get(dtype, (0, 0))
    if found < needed:
        raise ValueError(
            f"{names([dtype])} needs compute capability {needed[0]}.{needed[1]}; this GPU has {found[0]}.{found[1]}"
        )


def reference(a_MK: Tensor, b_KN: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """The same in plain PyTorch; fp8 and int8, which it does not multiply everywhere, are widened first."""
    out_dtype = out_dtype or OUTPUTS[a_MK.dtype][0]
    if a_MK.dtype == torch.int8:
        return (a_MK.to(torch.float64) @ b_KN.to(torch.float64)).to(torch.int32)  # exact: sums are below 2**53
    if a_MK.dtype == torch.float8_e4m3fn or out_dtype == torch.float32:
        return (a_MK.float() @ b_KN.float()).to(out_dtype)
    return a_MK @ b_KN


def flops(m: int, n: int, k: int) -> int:
    """FLOPs of an (m, k) by (k, n) product: a multiplication and an addition each, 2·m·n·k."""
    return 2 * m * n * k


def bytes_moved(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> int:
    """Bytes read and written once each; a GPU whose L2 does not hold a row of tiles reads more."""
    return sum(x.numel() * x.element_size() for x in (a_MK, b_KN, out_MN))
