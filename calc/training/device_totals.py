"""From the peak of a device's tensors to what its allocator reserves and its driver shows, and whether that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from calc.hardware import Gpu
from calc.training.overhead import Overhead, most, overhead
from calc.training.plan import TrainingPlan


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """Bytes of one device. `overhead` is expected, `most` has the highest context and fragmentation that were reported."""

    peak_bytes: int
    overhead: Overhead
    most: Overhead
    gpu_memory_bytes: int | None  # what the driver shows in all; None without a GPU

    @property
    def reserved_bytes(self) -> int:
        """What the allocator reserves."""
        return self.peak_bytes + self.overhead.workspace + self.overhead.fragmentation

    @property
    def driver_bytes(self) -> int:
        """What the driver shows."""
        return self.peak_bytes + sum(self.overhead)

    @property
    def driver_upper_bytes(self) -> int:
        """`driver_bytes` with the highest context and fragmentation that were reported."""
        return self.peak_bytes + sum(self.most)

    @property
    def fits(self) -> bool | None:
        """Whether all of it fits in what the driver shows; None without a GPU."""
        return None if self.gpu_memory_bytes is None else self.driver_bytes <= self.gpu_memory_bytes

    @property
    def fits_at_most(self) -> bool | None:
        """Whether it fits with `driver_upper_bytes` too; None without a GPU."""
        return None if self.gpu_memory_bytes is None else self.driver_upper_bytes <= self.gpu_memory_bytes

    @property
    def headroom_bytes(self) -> int | None:
        return None if self.gpu_memory_bytes is None else self.gpu_memory_bytes - self.driver_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "overhead_bytes": self.overhead._asdict(),
            "reserved_bytes": self.reserved_bytes,
            "driver_bytes": self.driver_bytes,
            "driver_upper_bytes": self.driver_upper_bytes,
            "gpu_memory_bytes": self.gpu_memory_bytes,
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
        }


def allocator_limit(plan: TrainingPlan, gpu: Gpu | None, *, experts: bool, scores: int) -> int | None:
    """Bytes of the device that the allocator may take for tensors: what context, NCCL and workspaces leave. None without a GPU."""
    if gpu is None or gpu.memory_bytes is None:
        return None
    lines = overhead(plan, gpu, 0, experts=experts, scores=scores, replayed=0)
    return gpu.memory_bytes - lines.context - lines.nccl - lines.workspace


def device_totals(
    plan: TrainingPlan,
    gpu: Gpu | None,
    peak: int,
    *,
    idle: int = 0,
    experts: bool = False,
    scores: int = 0,
    replayed: int | None = None,
) -> DeviceTotals:
    """The totals of a device whose tensors come to `peak` bytes; the rest as `overhead` has it."""
    lines = overhead(plan, gpu, peak, idle=idle, experts=experts, scores=scores, replayed=replayed)
    return DeviceTotals(peak, lines, most(plan, lines, peak), gpu.memory_bytes if gpu else None)
