"""Copy: the plainest use of memory bandwidth, one read and one write of every element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import is_interpreted

# On a GPU the fastest of these is found once per length and element size. Small blocks keep a consumer card's few
# multiprocessors evenly busy; large ones give a data-centre card's HBM enough bytes in flight.
_CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in ((1024, 4), (2048, 4), (4096, 8), (8192, 8), (16384, 16))
]
_INTERPRETED = [triton.Config({"BLOCK": 1024})]  # Triton's interpreter has no clock to tune by

# a copy moves bits, so every dtype goes as an integer of its width: NaN payloads, bool and fp8 included
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.autotune(configs=_INTERPRETED if is_interpreted() else _CONFIGS, key=["n"])
@triton.jit
def _copy(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * BLOCK  # int64: beyond 2**31 elements the offset outgrows 32 bits
    offsets = start + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=inside), mask=inside)


def copy(x: Tensor) -> Tensor:
    """out = x, in new memory. 0 FLOPs; moves 2·N·itemsize bytes (N elements read, N written). x is not modified.

    x: any shape, any dtype of 1, 2, 4 or 8 bytes, contiguous, on the GPU (or on the CPU in Triton's interpreter).
    ValueError when it is not.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    copy_into(out, x)
    return out


def copy_into(out: Tensor, x: Tensor) -> None:
    """out[:] = x, for an `out` of the same shape, dtype and device that shares no memory with x; else as `copy`."""
    _check(out, x)
    n = x.numel()
    if n == 0:
        return
    word = _WORDS[x.element_size()]
    _copy[lambda config: (triton.cdiv(n, config["BLOCK"]),)](x.view(-1).view(word), out.view(-1).view(word), n)


def _check(out: Tensor, x: Tensor) -> None:
    for name, tensor in (("x", x), ("out", out)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous; its shape is {tuple(tensor.shape)}, its strides {tensor.stride()}"
            )
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"out must match x ({tuple(x.shape)}, {x.dtype}, {x.device}); it is {tuple(out.shape)}, {out.dtype}, {out.device}"
        )
    if x.element_size() not in _WORDS:
        raise ValueError(f"the elements of x must have 1, 2, 4 or 8 bytes; {x.dtype} has {x.element_size()}")
    if x.device.type != "cuda" and not is_interpreted():
        raise ValueError(
            f"x must be on a GPU; it is on {x.device} (set TRITON_INTERPRET=1 before importing triton to run there)"
        )


def reference(x: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return x.clone(memory_format=torch.contiguous_format)


def bytes_moved(x: Tensor) -> int:
    """Bytes that a copy of x reads and writes: 2·N·itemsize."""
    return 2 * x.numel() * x.element_size()
