"""A timed kernel as rows: its time, rate or bandwidth against the roof, and its arithmetic intensity for the roofline plot."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Final, NamedTuple

import torch

from calc.hardware import gpu
from calc.measurements.records import Measured
from calc.units import GB, TB, MiB
from measure.devices import Device
from measure.timing import Spread, time_call

FORMATS: Final = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
}


class Roofs(NamedTuple):
    """FLOP/s and bytes/s that a device cannot exceed (its data sheet's) or did reach; None where nobody says."""

    flops: float | None
    bandwidth: float | None

    def seconds(self, flops: int, nbytes: int) -> float | None:
        """The roofline: the time of the slower of the two; None without roofs."""
        if not self.flops or not self.bandwidth:
            return None
        return max(flops / self.flops, nbytes / self.bandwidth)


def sheet_roofs(device: Device, dtype: torch.dtype) -> Roofs:
    """The data sheet's dense peak in that format, and its memory bandwidth."""
    if not device.catalogue:
        return Roofs(None, None)
    found = gpu(device.catalogue)
    return Roofs(found.peak_flops(FORMATS[dtype]), found.memory_bandwidth)


@lru_cache(maxsize=8)
def measured_roofs(device: Device, dtype: torch.dtype) -> Roofs:
    """What this device reaches now, measured in under a second: a square matmul, and a copy that is larger than its caches."""
    where = torch.device(device.name)
    large = device.kind != "cpu"
    n = 8192 if large else 512
    a = torch.randn(n, n, device=where).to(dtype)
    matmul = time_call(lambda: a @ a, where, seconds=0.3)
    nbytes = (1024 if large else 128) * MiB
    x = torch.ones(nbytes // 4, device=where)
    out = torch.empty_like(x)
    copy = time_call(lambda: out.copy_(x), where, seconds=0.3)
    return Roofs(2 * n**3 / matmul.median, 2 * nbytes / copy.median)


def with_triton(device: Device) -> bool:
    """Whether Triton's kernels run there in bf16: they compile for GPUs alone, NVIDIA's from compute capability 8.0 on."""
    if device.kind == "cpu" or find_spec("triton") is None:
        return False
    return device.kind != "cuda" or torch.cuda.get_device_capability(device.name) >= (8, 0)


def time_row(name: str, times: Spread, predicted: float | None) -> Measured:
    """Seconds of one call."""
    return Measured("", f"time/{name}", predicted, times.median, "seconds", times.p20, times.p80)


def rate_row(name: str, times: Spread, flops: int, roof: float | None) -> Measured:
    """FLOP/s in 10**12, against the peak."""
    p20, middle, p80 = (flops / seconds / TB for seconds in reversed(times))
    return Measured("", f"rate/{name}", roof and roof / TB, middle, "TFLOP/s", p20, p80)


def bandwidth_row(name: str, times: Spread, nbytes: int, roof: float | None) -> Measured:
    """Bytes/s in 10**9, reads and writes counted, against the memory's bandwidth."""
    p20, middle, p80 = (nbytes / seconds / GB for seconds in reversed(times))
    return Measured("", f"bandwidth/{name}", roof and roof / GB, middle, "GB/s", p20, p80)


def intensity_row(name: str, flops: int, nbytes: int) -> Measured:
    """FLOPs a byte, by the kernel's formulas: where it stands on the roofline. Nothing is measured."""
    return Measured("", f"intensity/{name}", flops / nbytes, None, "FLOP/B")
