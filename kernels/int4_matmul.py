"""Weight-only int4: activations in 16 bits times 4-bit weights with a scale for each group of inputs, as GPTQ and AWQ have."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import check, clean, configs, narrow, power_of_2, widen

DTYPES = (torch.bfloat16, torch.float16)
GROUPS = (32, 64, 128)  # weights that share a scale

# BM, BN, warps, stages; BK is the group, so that one scale serves a tile. compiled.csv says which of them suit a GPU and
# a group, the last is for what it lacks.
_TILES = (
    (128, 128, 8, 2),
    (64, 128, 4, 3),
    (64, 64, 4, 3),
    (32, 64, 4, 4),
    (16, 128, 4, 4),
    (16, 64, 4, 5),  # one token for each sequence: the weights' bytes are all the cost
    (16, 32, 2, 5),
    (16, 16, 1, 5),
)
_CHOICES = [({"BM": bm, "BN": bn, "ROWS": 8}, warps, stages) for bm, bn, warps, stages in _TILES]


@triton.autotune(
    configs=configs(_CHOICES, {"BM": 16, "BN": 16, "ROWS": 2}),
    key=["size", "N", "K", "GROUP"],
    prune_configs_by=clean("int4_matmul._int4_matmul", lambda given: str(given["GROUP"])),
)
@triton.jit
def _int4_matmul(  # type: ignore[no-untyped-def]
    x_ptr,
    packed_ptr,
    scale_ptr,
    out_ptr,
    M,
    N,
    K,
    size,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile_m, tile_n = tl.swizzle2d(
        tl.program_id(0) // tl.cdiv(N, BN), tl.program_id(0) % tl.cdiv(N, BN), tl.cdiv(M, BM), tl.cdiv(N, BN), ROWS
    )
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    row = n[:, None].to(tl.int64)
    x_ptrs = x_ptr + m[:, None].to(tl.int64) * K + tl.arange(0, GROUP)[None, :]
    packed_ptrs = packed_ptr + row * (K // 2) + tl.arange(0, GROUP // 2)[None, :]
    scale_ptrs = scale_ptr + n.to(tl.int64) * (K // GROUP)
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, GROUP):
        x = tl.load(x_ptrs, mask=m[:, None] < M, other=0.0)
        packed = tl.load(packed_ptrs, mask=n[:, None] < N, other=0).to(tl.int32)
        scale = tl.load(scale_ptrs, mask=n < N, other=0.0)
        weight = tl.interleave(packed % 16, packed // 16) - 8
        # integers of -8 to 7 are exact in 16 bits; the group's scale is put on its sums, in fp32
        part = tl.dot(widen(x), tl.trans(widen(narrow(weight.to(tl.float32), x.dtype))))
        acc += part * scale[None, :]
        x_ptrs += GROUP
        packed_ptrs += GROUP // 2
        scale_ptrs += 1
    out_ptrs = out_ptr + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out_ptrs, narrow(acc, out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def int4_matmul(x_MK: Tensor, packed_NK: Tensor, scale_NG: Tensor) -> Tensor:
    """out_MN = x · weightᵀ in the dtype of x, summed in fp32; `quantize_int4` gives packed and scale.

    packed (N, K/2) uint8 holds two weights a byte, the even one low, as value + 8; scale (N, K/group) fp32, group 32, 64 or
    128. 2·M·N·K FLOPs; moves (M·K + M·N)·2 + N·K/2 + 4·N·K/group bytes, a quarter of a 16-bit matmul's where M is small.
    x is bf16 or fp16; all contiguous, none modified. ValueError for any other shape, dtype, layout or device.
    """
    check("x", x_MK, dims=2, dtypes=DTYPES)
    check("packed", packed_NK, dims=2, dtypes=(torch.uint8,), like=("x", x_MK))
    check("scale", scale_NG, dims=2, dtypes=(torch.float32,), like=("x", x_MK))
    (m, k), n = x_MK.shape, packed_NK.shape[0]
    if packed_NK.shape[1] * 2 != k:
        raise ValueError(
            f"packed must have half as many columns as x, {k / 2:g}; its shape is {tuple(packed_NK.shape)}"
        )
    if scale_NG.shape[0] != n or k not in [scale_NG.shape[1] * group for group in GROUPS]:
        raise ValueError(
            f"scale must be ({n}, {k} / group) with a group of {', '.join(map(str, GROUPS))}; it is {tuple(scale_NG.shape)}"
        )
    out_MN = torch.empty((m, n), dtype=x_MK.dtype, device=x_MK.device)
    if out_MN.numel():

        def grid(config: dict[str, int]) -> tuple[int]:
            return (triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"]),)

        _int4_matmul[grid](x_MK, packed_NK, scale_NG, out_MN, m, n, k, power_of_2(m), GROUP=k // scale_NG.shape[1])
    return out_MN


def quantize_int4(weight_NK: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    """(packed, scale) of weights, in plain PyTorch as it is done once: scale = max|w| / 7 of each group, w / scale rounded."""
    if weight_NK.dim() != 2 or group not in GROUPS or weight_NK.shape[1] % group:
        raise ValueError(
            f"weight must be (N, a multiple of group), group one of {', '.join(map(str, GROUPS))}; "
            f"they are {tuple(weight_NK.shape)} and {group}"
        )
    n, k = weight_NK.shape
    grouped = weight_NK.float().view(n, k // group, group)
    scale_NG = grouped.abs().amax(-1) / 7
    q = (grouped / torch.where(scale_NG == 0, 1.0, scale_NG)[..., None]).round() + 8
    q = q.to(torch.uint8).view(n, k)
    return q[:, ::2] + q[:, 1::2] * 16, scale_NG


def restore(packed_NK: Tensor, scale_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, K) of weights, value·scale in the dtype of scale, then rounded."""
    q = torch.stack([packed_NK % 16, packed_NK // 16], -1).flatten(1).to(scale_NG.dtype) - 8
    return (q * scale_NG.repeat_interleave(q.shape[1] // scale_NG.shape[1], 1)).to(dtype)


def reference(x_MK: Tensor, packed_NK: Tensor, scale_NG: Tensor) -> Tensor:
    """The same in plain PyTorch, which restores the weights in the dtype of x first."""
    return x_MK @ restore(packed_NK, scale_NG, x_MK.dtype).t()


def bytes_moved(x_MK: Tensor, packed_NK: Tensor, scale_NG: Tensor) -> int:
    """Bytes of x, the weights, their scales and the product, once each."""
    (m, k), n = x_MK.shape, packed_NK.shape[0]
    return (m * k + m * n) * x_MK.element_size() + packed_NK.numel() + 4 * scale_NG.numel()
