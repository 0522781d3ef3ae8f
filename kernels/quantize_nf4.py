"""NF4, the 4-bit type of QLoRA (arXiv 2305.14314): blocks of 64 weights, each the nearest of 16 normal quantiles by absmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import as_fp32, check, configs, narrow
from kernels.quantize_int8 import to_int8

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 64  # weights that share an absmax
GROUP = 256  # absmaxes that share a scale once they are quantised too
# quantiles of the standard normal distribution over the largest one, eight below zero, zero, and seven above
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_WEIGHTS: tl.constexpr = tl.constexpr(BLOCK)
_ABSMAXES: tl.constexpr = tl.constexpr(GROUP)

_CHOICES = [({"BLOCKS": blocks}, warps, 1) for blocks, warps in ((16, 4), (32, 4), (64, 4), (64, 8), (128, 8))]


@dataclass(frozen=True, slots=True)
class Nf4:
    """Weights in NF4: two a byte, the first in the high four bits, and the absmax of each block of 64.

    absmax is fp32, or int8 after double quantisation, and then means q·scale of its group of 256 + mean (one fp32).
    """

    packed: Tensor
    absmax: Tensor
    scale: Tensor | None
    mean: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parts: 4.5 bits a weight, with double quantisation 4 + 8/64 + 32/(64·256) = 4.127."""
        return sum(part.nbytes for part in (self.packed, self.absmax, self.scale, self.mean) if part is not None)


@triton.autotune(configs=configs(_CHOICES, {"BLOCKS": 16}), key=["n"])
@triton.jit
def _quantize(x_ptr, middle_ptr, packed_ptr, absmax_ptr, n, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = block[:, None] * _WEIGHTS + tl.arange(0, _WEIGHTS)[None, :]
    x = as_fp32(tl.load(x_ptr + offsets, mask=offsets < n, other=0.0))
    absmax = tl.max(tl.abs(x), 1)
    tl.store(absmax_ptr + block, absmax, mask=block * _WEIGHTS < n)
    unit = tl.div_rn(x, tl.where(absmax == 0, 1.0, absmax)[:, None])
    index = tl.zeros((BLOCKS, _WEIGHTS), tl.int32)
    for i in range(15):  # the level's number is the count of midpoints below
        index += (unit > tl.load(middle_ptr + i)).to(tl.int32)
    first, second = tl.split(tl.reshape(index, (BLOCKS, _WEIGHTS // 2, 2)))
    byte = block[:, None] * (_WEIGHTS // 2) + tl.arange(0, _WEIGHTS // 2)[None, :]
    tl.store(packed_ptr + byte, (first * 16 + second).to(tl.uint8), mask=byte * 2 < n)


@triton.jit
def _quantize_absmax(absmax_ptr, mean_ptr, q_ptr, scale_ptr, blocks):  # type: ignore[no-untyped-def]
    group = tl.program_id(0)
    block = group * _ABSMAXES + tl.arange(0, _ABSMAXES)
    off = tl.where(block < blocks, tl.load(absmax_ptr + block, mask=block < blocks, other=0.0) - tl.load(mean_ptr), 0.0)
    scale = tl.div_rn(tl.max(tl.abs(off), 0), 127.0)
    tl.store(q_ptr + block, to_int8(off, scale), mask=block < blocks)
    tl.store(scale_ptr + group, scale)


@triton.autotune(configs=configs(_CHOICES, {"BLOCKS": 16}), key=["n"])
@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    packed_ptr, absmax_ptr, scale_ptr, mean_ptr, level_ptr, x_ptr, n, DOUBLE: tl.constexpr, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    absmax = tl.load(absmax_ptr + block, mask=block * _WEIGHTS < n, other=0).to(tl.float32)
    if DOUBLE:
        scale = tl.load(scale_ptr + block // _ABSMAXES, mask=block * _WEIGHTS < n, other=0.0)
        absmax = absmax * scale + tl.load(mean_ptr)
    byte = block[:, None] * (_WEIGHTS // 2) + tl.arange(0, _WEIGHTS // 2)[None, :]
    packed = tl.load(packed_ptr + byte, mask=byte * 2 < n, other=0).to(tl.int32)
    level = tl.interleave(tl.load(level_ptr + packed // 16), tl.load(level_ptr + packed % 16))
    offsets = block[:, None] * _WEIGHTS + tl.arange(0, _WEIGHTS)[None, :]
    tl.store(x_ptr + offsets, narrow(level * absmax[:, None], x_ptr.dtype.element_ty), mask=offsets < n)


def _grid(n: int) -> object:
    return lambda config: (triton.cdiv(n, BLOCK * config["BLOCKS"]),)


def quantize_nf4(x: Tensor, double: bool = False) -> Nf4:
    """x, in order, 64 weights a block: the number of the level nearest to x / absmax, and absmax = max|x| of the block.

    `double` quantises the absmaxes too: less their mean, absmax int8 by groups of 256 (bitsandbytes has 8-bit floats
    there; the bytes are the same). |x - restored| <= 0.152·absmax, half the widest gap between levels, plus with `double`
    the absmax's own error, a 254th of its group's largest distance from the mean.

    About 33·N FLOPs (15 comparisons a weight); moves N·(itemsize + 1/2 + 4/64) bytes. x is not modified: any shape, bf16,
    fp16 or fp32, contiguous, else ValueError; finite, which is not checked.
    """
    check("x", x, dtypes=DTYPES)
    n, blocks = x.numel(), math.ceil(x.numel() / BLOCK)
    packed = torch.empty(math.ceil(n / 2), dtype=torch.uint8, device=x.device)
    absmax = torch.empty(blocks, dtype=torch.float32, device=x.device)
    if n:
        _quantize[_grid(n)](x, _midpoints(x.device), packed, absmax, n)
    if not double:
        return Nf4(packed, absmax, None, None, tuple(x.shape), x.dtype)
    mean = absmax.mean() if n else absmax.new_zeros(())
    groups = math.ceil(blocks / GROUP)
    q = torch.empty(blocks, dtype=torch.int8, device=x.device)
    scale = torch.empty(groups, dtype=torch.float32, device=x.device)
    if n:
        _quantize_absmax[(groups,)](absmax, mean, q, scale, blocks, num_warps=4)
    return Nf4(packed, q, scale, mean, tuple(x.shape), x.dtype)


def dequantize_nf4(weights: Nf4) -> Tensor:
    """The weights in their own shape and dtype: level·absmax. N FLOPs; moves N·(1/2 + 4/64 + itemsize) bytes."""
    n, double = math.prod(weights.shape), weights.scale is not None
    check("packed", weights.packed, shape=(math.ceil(n / 2),), dtypes=(torch.uint8,))
    where, blocks = ("packed", weights.packed), math.ceil(n / BLOCK)
    check("absmax", weights.absmax, shape=(blocks,), dtypes=(torch.int8 if double else torch.float32,), like=where)
    scale, mean = weights.scale, weights.mean
    if scale is None or mean is None:
        scale = mean = weights.absmax  # not read
    else:
        check("scale", scale, shape=(math.ceil(blocks / GROUP),), dtypes=(torch.float32,), like=where)
        check("mean", mean, shape=(), dtypes=(torch.float32,), like=where)
    x = torch.empty(weights.shape, dtype=weights.dtype, device=weights.packed.device)
    check("the result", x, dtypes=DTYPES)
    if n:
        levels = torch.tensor(LEVELS, dtype=torch.float32, device=x.device)
        _dequantize[_grid(n)](weights.packed, weights.absmax, scale, mean, levels, x, n, DOUBLE=double)
    return x


def _midpoints(device: torch.device) -> Tensor:
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=device)
    return (levels[1:] + levels[:-1]) / 2


def reference(x: Tensor, double: bool = False) -> Nf4:
    """`quantize_nf4` in plain PyTorch."""
    n = x.numel()
    flat = torch.nn.functional.pad(x.float().flatten(), (0, -n % BLOCK)).view(-1, BLOCK)
    absmax = flat.abs().amax(1)
    unit = flat / torch.where(absmax == 0, 1.0, absmax)[:, None]
    index = torch.bucketize(unit, _midpoints(x.device)).to(torch.uint8).flatten()[: n + n % 2]
    packed = index[::2] * 16 + index[1::2]
    if not double:
        return Nf4(packed, absmax, None, None, tuple(x.shape), x.dtype)
    mean = absmax.mean()
    off = torch.nn.functional.pad(absmax - mean, (0, -len(absmax) % GROUP)).view(-1, GROUP)
    scale = off.abs().amax(1) / 127
    q = (off / torch.where(scale == 0, 1.0, scale)[:, None]).round().to(torch.int8).flatten()[: len(absmax)]
    return Nf4(packed, q, scale, mean, tuple(x.shape), x.dtype)


def reference_dequantize(weights: Nf4, dtype: torch.dtype = torch.float32) -> Tensor:
    """`dequantize_nf4` in plain PyTorch, with products in `dtype` (float64 for the exact value)."""
    n = math.prod(weights.shape)
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=weights.packed.device).to(dtype)
    absmax = weights.absmax.to(dtype)
    if weights.scale is not None and weights.mean is not None:
        absmax = absmax * weights.scale.to(dtype).repeat_interleave(GROUP)[: len(absmax)] + weights.mean.to(dtype)
    index = torch.stack([weights.packed // 16, weights.packed % 16], 1).flatten()[:n].long()
    x = (levels[index] * absmax.repeat_interleave(BLOCK)[:n]).view(weights.shape)
    return x if dtype == torch.float64 else x.to(weights.dtype)


def bytes_moved(x: Tensor) -> int:
    """Bytes of quantising x, and of dequantising to its dtype: N·itemsize, ⌈N/2⌉ packed and 4 for each block."""
    n = x.numel()
    return n * x.element_size() + math.ceil(n / 2) + 4 * math.ceil(n / BLOCK)
