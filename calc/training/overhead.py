"""What the device holds on top of the tensors: four editable lines, each with its default's source."""

from __future__ import annotations

from typing import NamedTuple

from calc.hardware import Gpu
from calc.training.plan import TrainingPlan
from calc.units import MiB

# Bytes of a CUDA context with lazily loaded kernels: reports run from 300 to over 700 MB (pytorch/pytorch#107667, #28113).
CONTEXT, CONTEXT_MOST = 512 * MiB, 768 * MiB
# One NCCL communicator of two devices, and of more (measured on A100 with NVLink: NVIDIA/nccl#964).
NCCL_PAIR, NCCL_GROUP = 544 * MiB, 688 * MiB
# cuBLAS workspace that PyTorch allocates (aten/src/ATen/cuda/CublasHandlePool.cpp): compute capability 9.0 and later, earlier.
# Each thread has a handle and a workspace of its own: the one that runs forward, and autograd's, which runs backward.
WORKSPACE_NEW, WORKSPACE_OLD, THREADS = 32 * MiB, 8_519_680, 2
# Transformer Engine's own, of compute capability 9.0 and later, and earlier; the grouped matmul of experts has one a stream.
ENGINE_NEW, ENGINE_OLD, STREAMS = 32 * MiB, 4 * MiB, 4
# Reserved by the allocator but not allocated, in percent of the peak; it depends on the order of sizes. SimuMax measured 2.8 to 9.3 on
# eleven Megatron runs (docs/b200/b200_release_v1.2_summary.json), 4.7 in the median; torchtitan's published runs come to 16. What lies
# idle in the pools of other streams comes on top: CUDACachingAllocator.cpp keeps freed blocks for the stream that asked for them.
FRAGMENTATION, FRAGMENTATION_MOST = 5.0, 16.0

SOURCES = {
    "context": "CUDA context: 512 MiB assumed; reports run from 300 to 700 MB (pytorch/pytorch issues 107667 and 28113)",
    "nccl": "NCCL: 544 MiB for each group of two devices, 688 MiB for each larger one (NVIDIA/nccl issue 964, A100)",
    "workspace": "cuBLAS workspace, one for forward's thread and one for backward's: 32 MiB from compute capability 9.0, else "
    "8,519,680 bytes (PyTorch, CublasHandlePool.cpp); implementation fused adds Transformer Engine's of 32 or 4 MiB, with experts "
    "four more (transformer_engine/pytorch/cpp_extensions/gemm.py); implementation paper adds the buffer into which Megatron's unfused "
    "attention writes its scores (megatron/core/transformer/dot_product_attention.py)",
    "fragmentation": "allocator: what a model of PyTorch's reserves beyond the peak when two steps' allocations are played through it "
    "(CUDACachingAllocator.cpp), a pool a stream; 5 % of the peak for Megatron's programs, pipelines and preference objectives (SimuMax "
    "on Megatron: 2.8 to 9.3); measure yours as reserved minus allocated",
}


class Overhead(NamedTuple):
    """Bytes besides the tensors. `context` and `nccl` lie outside the allocator, the others inside what it reserves."""

    context: int
    nccl: int
    workspace: int
    fragmentation: int


def overhead(
    plan: TrainingPlan,
    gpu: Gpu | None,
    peak: int,
    *,
    idle: int = 0,
    experts: bool = False,
    scores: int = 0,
    replayed: int | None = None,
) -> Overhead:
    """The four lines, each the user's own number where one is given. `idle`: bytes of other streams' pools; `experts`: the model
    has some; `scores`: the buffer of unfused attention; `replayed`: what the model of the allocator reserves beyond the peak, in
    the place of an assumed share."""
    groups = [degree for degree in (plan.dp * plan.cp, plan.cp, plan.tp, plan.pp, plan.ep) if degree > 1]
    nccl = sum(NCCL_PAIR if degree == 2 else NCCL_GROUP for degree in groups)
    percent = plan.fragmentation_percent
    beyond = int(peak * FRAGMENTATION / 100) + idle if replayed is None else replayed
    return Overhead(
        _given(plan.context_mib, CONTEXT),
        _given(plan.nccl_mib, nccl),
        _given(plan.workspace_mib, _workspace(plan, gpu, experts) + scores),
        beyond if percent is None else int(peak * percent / 100),
    )


def most(plan: TrainingPlan, lines: Overhead, peak: int) -> Overhead:
    """The same lines with the highest context and fragmentation that were reported; the user's own numbers as they are."""
    context = lines.context if plan.context_mib is not None else CONTEXT_MOST
    highest = max(lines.fragmentation, int(peak * FRAGMENTATION_MOST / 100))
    fragmentation = highest if plan.fragmentation_percent is None else lines.fragmentation
    return lines._replace(context=context, fragmentation=fragmentation)


def _workspace(plan: TrainingPlan, gpu: Gpu | None, experts: bool) -> int:
    old = gpu is not None and gpu.compute_capability is not None and float(gpu.compute_capability) < 9
    torch = THREADS * (WORKSPACE_OLD if old else WORKSPACE_NEW)
    if plan.implementation != "fused":
        return torch
    return torch + (1 + STREAMS * experts) * (ENGINE_OLD if old else ENGINE_NEW)


def _given(mib: float | None, default: int) -> int:
    return default if mib is None else int(mib * MiB)
