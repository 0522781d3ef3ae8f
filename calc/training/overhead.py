"""What the device holds on top of the tensors: four editable lines, each with its default's source."""

from __future__ import annotations

from typing import NamedTuple

from calc.hardware import Gpu
from calc.training.plan import TrainingPlan
from calc.units import MiB

# Bytes of a CUDA context with lazily loaded kernels: reports run from 300 to over 700 MB (pytorch/pytorch#107667, #28113).
CONTEXT = 512 * MiB
# One NCCL communicator of two devices, and of more (measured on A100 with NVLink: NVIDIA/nccl#964).
NCCL_PAIR, NCCL_GROUP = 544 * MiB, 688 * MiB
# cuBLAS workspace that PyTorch allocates (aten/src/ATen/cuda/CublasHandlePool.cpp): compute capability 9.0 and later, earlier.
WORKSPACE_NEW, WORKSPACE_OLD = 32 * MiB, 8_519_680
# Reserved by the allocator but not allocated, in percent of the peak: an assumption; it depends on the order of sizes.
FRAGMENTATION = 5.0

SOURCES = {
    "context": "CUDA context: 512 MiB assumed; reports run from 300 to 700 MB (pytorch/pytorch issues 107667 and 28113)",
    "nccl": "NCCL: 544 MiB for each group of two devices, 688 MiB for each larger one (NVIDIA/nccl issue 964, A100)",
    "workspace": "cuBLAS workspace: 32 MiB from compute capability 9.0, else 8,519,680 bytes (PyTorch, CublasHandlePool.cpp)",
    "fragmentation": "allocator: 5 % of the peak assumed reserved but not allocated; measure yours as reserved minus allocated",
}


class Overhead(NamedTuple):
    """Bytes beside the tensors. `context` and `nccl` lie outside the allocator, the others inside what it reserves."""

    context: int
    nccl: int
    workspace: int
    fragmentation: int


def overhead(plan: TrainingPlan, gpu: Gpu | None, peak: int) -> Overhead:
    """The four lines, each the user's own number where one is given."""
    groups = [degree for degree in (plan.dp * plan.cp, plan.cp, plan.tp, plan.pp, plan.ep) if degree > 1]
    nccl = sum(NCCL_PAIR if degree == 2 else NCCL_GROUP for degree in groups)
    old = gpu is not None and gpu.compute_capability is not None and float(gpu.compute_capability) < 9
    percent = FRAGMENTATION if plan.fragmentation_percent is None else plan.fragmentation_percent
    return Overhead(
        _given(plan.context_mib, CONTEXT),
        _given(plan.nccl_mib, nccl),
        _given(plan.workspace_mib, WORKSPACE_OLD if old else WORKSPACE_NEW),
        int(peak * percent / 100),
    )


def _given(mib: float | None, default: int) -> int:
    return default if mib is None else int(mib * MiB)
