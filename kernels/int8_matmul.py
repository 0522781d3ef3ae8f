"""Weight-only int8: activations in 16 bits times int8 weights with a scale for each output, as served models keep them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import check, clean, configs, narrow, power_of_2, widen

DTYPES = (torch.bfloat16, torch.float16)

# BM, BN, BK, warps, stages; compiled.csv says which of them suit a GPU, the last is for what it lacks
_TILES = (
    (128, 128, 64, 8, 4),
    (128, 128, 64, 4, 3),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (32, 64, 128, 4, 4),
    (16, 64, 128, 4, 5),  # one token for each sequence: the weights' bytes are all the cost
    (16, 32, 256, 4, 4),
    (16, 16, 256, 2, 5),
)
_CHOICES = [({"BM": bm, "BN": bn, "BK": bk, "GROUP": 8}, warps, stages) for bm, bn, bk, warps, stages in _TILES]


@triton.autotune(
    configs=configs(_CHOICES, {"BM": 16, "BN": 32, "BK": 16, "GROUP": 2}),
    key=["size", "N", "K"],
    prune_configs_by=clean("int8_matmul._int8_matmul", lambda given: "any"),
)
@triton.jit
def _int8_matmul(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    M,
    N,
    K,
    size,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_m, tile_n = tl.swizzle2d(
        tl.program_id(0) // tl.cdiv(N, BN), tl.program_id(0) % tl.cdiv(N, BN), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP
    )
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_ptrs = x_ptr + m[:, None].to(tl.int64) * K + k[None, :]
    weight_ptrs = weight_ptr + n[None, :].to(tl.int64) * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for start_k in range(0, K, BK):
        x = tl.load(x_ptrs, mask=(m[:, None] < M) & (k[None, :] < K - start_k), other=0.0)
        weight = tl.load(weight_ptrs, mask=(n[None, :] < N) & (k[:, None] < K - start_k), other=0)
        # every int8 is exact in 16 bits; its scale waits until the sum is done
        acc = tl.dot(widen(x), widen(narrow(weight.to(tl.float32), x.dtype)), acc)
        x_ptrs += BK
        weight_ptrs += BK
    scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
    out_ptrs = out_ptr + m[:, None].to(tl.int64) * N + n[None, :]
    out = narrow(acc * scale[None, :], out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=(m[:, None] < M) & (n[None, :] < N))


def int8_matmul(x_MK: Tensor, weight_NK: Tensor, scale_N: Tensor) -> Tensor:
    """out_MN = x · (weight·scale)ᵀ in the dtype of x, summed in fp32: `quantize_int8` gives weight and scale.

    2·M·N·K FLOPs; moves (M·K + M·N)·2 + N·K + 4·N bytes, half a 16-bit matmul's where M is small. x is bf16 or fp16,
    weight int8, scale fp32; all contiguous, none modified. ValueError for any other shape, dtype, layout or device.
    """
    check("x", x_MK, dims=2, dtypes=DTYPES)
    check("weight", weight_NK, dims=2, dtypes=(torch.int8,), like=("x", x_MK))
    (m, k), n = x_MK.shape, weight_NK.shape[0]
    if weight_NK.shape[1] != k:
        raise ValueError(f"weight must have {k} columns, as x has; its shape is {tuple(weight_NK.shape)}")
    check("scale", scale_N, shape=(n,), dtypes=(torch.float32,), like=("x", x_MK))
    out_MN = torch.empty((m, n), dtype=x_MK.dtype, device=x_MK.device)
    if out_MN.numel():

        def grid(config: dict[str, int]) -> tuple[int]:
            return (triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"]),)

        _int8_matmul[grid](x_MK, weight_NK, scale_N, out_MN, m, n, k, power_of_2(m))
    return out_MN


def reference(x_MK: Tensor, weight_NK: Tensor, scale_N: Tensor) -> Tensor:
    """The same in plain PyTorch, which restores the weights in the dtype of x first."""
    return x_MK @ (weight_NK.to(scale_N.dtype) * scale_N[:, None]).to(x_MK.dtype).t()


def bytes_moved(x_MK: Tensor, weight_NK: Tensor) -> int:
    """Bytes of x, the weights, their scales and the product, once each."""
    (m, k), n = x_MK.shape, weight_NK.shape[0]
    return (m * k + m * n) * x_MK.element_size() + n * k + 4 * n
