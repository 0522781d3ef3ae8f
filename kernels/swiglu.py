"""SwiGLU's elementwise part, both ways: silu(gate)∘up, without the intermediate that two kernels would write and read."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.launch import ELEMENTWISE, LOG2_E, as_fp32, check, configs, narrow

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    decay = tl.exp2(-tl.abs(x) * LOG2_E)  # never overflows
    return tl.where(x >= 0, 1.0, decay) / (1.0 + decay)


@triton.autotune(configs=configs(ELEMENTWISE, {"BLOCK": 64}), key=["n"])
@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    gate = as_fp32(tl.load(gate_ptr + offsets, mask=inside, other=0.0))
    up = as_fp32(tl.load(up_ptr + offsets, mask=inside, other=0.0))
    tl.store(out_ptr + offsets, narrow(gate * _sigmoid(gate) * up, out_ptr.dtype.element_ty), mask=inside)


@triton.autotune(configs=configs(ELEMENTWISE, {"BLOCK": 64}), key=["n"])
@triton.jit
def _backward(gate_ptr, up_ptr, dout_ptr, dgate_ptr, dup_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    gate = as_fp32(tl.load(gate_ptr + offsets, mask=inside, other=0.0))
    up = as_fp32(tl.load(up_ptr + offsets, mask=inside, other=0.0))
    dout = as_fp32(tl.load(dout_ptr + offsets, mask=inside, other=0.0))
    share = _sigmoid(gate)
    dgate = dout * up * share * (1.0 + gate * (1.0 - share))
    tl.store(dgate_ptr + offsets, narrow(dgate, dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + offsets, narrow(dout * gate * share, dup_ptr.dtype.element_ty), mask=inside)


class _Swiglu(torch.autograd.Function):
    """Keeps gate and up, not silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out, n = torch.empty_like(gate), gate.numel()
        if n:
            _forward[lambda config: (triton.cdiv(n, config["BLOCK"]),)](gate, up, out, n)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup, n = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        if n:
            dout = grads[0].contiguous()
            _backward[lambda config: (triton.cdiv(n, config["BLOCK"]),)](gate, up, dout, dgate, dup, n)
        return dgate, dup


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """out = gate·sigmoid(gate)·up, in fp32 inside; differentiable in both. Nothing is modified.

    About 6·N FLOPs forward, 12·N backward, an exponential counted as one. Moves 3·N·itemsize bytes forward (gate and up
    kept), 5·N·itemsize backward. One shape, bf16, fp16 or fp32, contiguous; else ValueError.
    """
    check("gate", gate, dtypes=DTYPES)
    check("up", up, shape=tuple(gate.shape), dtypes=(gate.dtype,), like=("gate", gate))
    out: Tensor = _Swiglu.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """The same in plain PyTorch, which rounds silu(gate) to its dtype between its two kernels."""
    return functional.silu(gate) * up


def bytes_moved(gate: Tensor) -> int:
    """Bytes of forward: 3·N·itemsize."""
    return 3 * gate.numel() * gate.element_size()
