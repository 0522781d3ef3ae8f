"""Seconds of attention's scores and values: by the measured tables, as fast as the named program runs on that generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from calc.hardware import Gpu
from calc.kernel_times import KernelTimes
from calc.step_time.machine import slower_clocks
from calc.step_time.operations import Core
from calc.step_time.plan import AttentionKernel, TimePlan

# Rate over the tables' (FlashAttention-3 on Hopper, FlashAttention-2 on Ampere, the engines' own on Blackwell), by the first figure of
# the compute capability. Hopper, head size 128, 16k tokens: FlashAttention-3 648, cuDNN 595, FlashAttention-2 370 TFLOP/s
# (FlashAttention-3, arXiv 2407.08608, figure 5).
_RATE: Final[Mapping[tuple[str, str], float]] = {
    ("9", "flash-3"): 1.0,
    ("9", "cudnn"): 595 / 648,
    ("9", "flash-2"): 370 / 648,
    ("8", "flash-2"): 1.0,
    ("8", "cudnn"): 1.0,
}
# How much longer than FlashAttention-2 older kernels take, forward and backward. FlashAttention-2, arXiv 2307.08691, section 4.1:
# "around 2x" as fast as FlashAttention, "around 1.3-1.5x" in the forward and "around 2x" in the backward as its Triton kernel.
# xformers' CUTLASS kernels on A100 are 5 % slower than FlashAttention in the forward and 55 % in the backward (facebookresearch/xformers,
# pull request 362, means): PyTorch's memory-efficient attention.
_OLDER: Final[Mapping[str, tuple[float, float]]] = {
    "flash-1": (2.0, 2.0),
    "flash-triton": (1.4, 2.0),
    "memory-efficient": (2.0 * 1.05, 2.0 * 1.55),
}
# What the forward sustains at most, causal, head size 128, in TFLOP/s: 616 on H100 (the same, figure 5), 185 on A100 and 1,120 on B200
# (SimuMax, configs/system: 4,096 tokens of 64 and of 128 heads, half of the whole square's FLOPs)
_MOST: Final = (
    ("h100", 616.0), ("h200", 616.0), ("a100", 185.0), ("b200", 1120.0), ("gb200", 1120.0), ("b300", 1120.0), ("gb300", 1120.0),
)  # fmt: skip
# Backward: 2.5 times the FLOPs (five products for two), at this share of the forward's rate: 561 of 648 TFLOP/s by
# FlashAttention-3, 516 of 595 by cuDNN, 322 of 370 by FlashAttention-2 (arXiv 2407.08608, figures 5 and 6).
_BACKWARD_FLOPS: Final = 2.5
_BACKWARD_RATE: Final = 561 / 648


def attention_seconds(
    cores: tuple[Core, ...], tokens: int, plan: TimePlan, gpu: Gpu, times: KernelTimes
) -> tuple[float, float]:
    """Forward and backward seconds of a layer's cores on one rank that holds so many tokens."""
    forward = backward = 0.0
    generation = (gpu.compute_capability or "").partition(".")[0]
    slower = slower_clocks(gpu) if times.source != "roofline" else 1.0
    for core in cores:
        program, batch = attention_kernel(core, plan), tokens * core.cp // core.seq
        if program == "unfused":
            a, b = _unfused(core, batch, times)
        else:
            ahead, back = _OLDER.get(program, (1.0, 1.0))
            rate = _RATE.get((generation, "flash-2" if program in _OLDER else program), 1.0)
            fused = max(_fused(core, batch, times), _floor(core, batch, gpu, times)) / core.cp / rate * slower
            a, b = fused * ahead, fused * back * _BACKWARD_FLOPS / _BACKWARD_RATE
        forward += a
        backward += b
    return forward, backward


def attention_kernel(core: Core, plan: TimePlan) -> AttentionKernel:
    """The kernel that a core runs by: the plan's, or with SDPA the memory-efficient one where values are not as wide as keys, which its
    FlashAttention refuses (PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
    program = plan.attention_program
    chosen = plan.attention_kernel is None and program == "flash-2" and plan.attention == "sdpa"
    return "memory-efficient" if chosen and core.head_dim != core.v_head_dim else program


def _fused(core: Core, batch: int, times: KernelTimes) -> float:
    """The forward as the tables have it."""
    if core.latent and not core.window:
        rope = min(64, core.head_dim // 3)
        latent = times.mla_context(
            batch=batch,
            query=core.seq,
            heads=core.heads,
            qk_nope=core.head_dim - rope,
            qk_rope=rope,
            v_head=core.v_head_dim,
        )
        return float(latent)
    plain = times.context_attention(
        batch=batch,
        query=core.seq,
        context=0,
        heads=core.heads,
        kv_heads=core.kv_heads,
        head_dim=max(core.head_dim, core.v_head_dim),
        window=core.window if core.window < core.seq else 0,
        causal=core.causal,
    )
    return float(plain)


def _floor(core: Core, batch: int, gpu: Gpu, times: KernelTimes) -> float:
    """What the core takes at the highest rate that a source has for this GPU."""
    most = next((rate for name, rate in _MOST if gpu.name.startswith(name)), None)
    if most is None or times.source == "roofline":
        return 0.0
    keys = core.window if 0 < core.window < core.seq else core.seq / (2 if core.causal else 1)
    flops = 2.0 * batch * core.seq * keys * core.heads * (core.head_dim + core.v_head_dim)
    return flops / (most * 1e12)


def _unfused(core: Core, batch: int, times: KernelTimes) -> tuple[float, float]:
    """Two batched products forward and four backward over the whole square."""
    pairs = batch * core.heads / core.cp
    size = float(times.gemm(core.seq, core.seq, core.head_dim))
    return 2 * pairs * size, 4 * pairs * size
