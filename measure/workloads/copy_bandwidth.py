"""Bandwidth of a copy: 2·N·itemsize bytes over its time, torch's copy beside Triton's, against the data sheet.

The data sheet's bandwidth is a peak; what a copy reaches of it is the finding. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from calc.hardware import gpu
from calc.records import Measured
from calc.units import GB, GiB, MiB
from measure.timing import time_call
from measure.workloads import Setting

# bytes of each of the two tensors: together well above the last cache of a GPU (50 MB on an H100, 256 MB on an MI300X)
SIZES: Final = {"small": (256 * MiB, "256 MiB"), "medium": (2 * GiB, "2 GiB")}
_DTYPE: Final = torch.bfloat16


def run(setting: Setting) -> Iterator[Measured]:
    """One row a copy: `bandwidth/torch`, and on a GPU `bandwidth/triton`, in GB/s (10**9 bytes, reads and writes counted)."""
    nbytes, title = SIZES[setting.size]
    device = torch.device(setting.device.name)
    setting.tell(0.0, f"filling {title} on {setting.device.title}")
    x = torch.empty(
        nbytes // _DTYPE.itemsize, dtype=_DTYPE, device=device
    ).normal_()  # zeros could compress, or run cooler
    out = torch.empty_like(x)
    sheet = gpu(setting.device.catalogue).memory_bandwidth if setting.device.catalogue else None
    copies = _copies(setting)
    for index, (name, copy) in enumerate(copies.items()):
        setting.tell((index + 0.5) / len(copies), f"copying with {name}")
        out.fill_(float("nan"))
        times = time_call(lambda copy=copy: copy(out, x), device)  # type: ignore[misc]
        if not torch.equal(out, x):
            raise RuntimeError(f"{name}'s copy is not equal to what it copied")
        p20, middle, p80 = (2 * nbytes / seconds / GB for seconds in reversed(times))
        yield Measured(title, f"bandwidth/{name}", sheet and sheet / GB, middle, "GB/s", p20, p80)


def _copies(setting: Setting) -> dict[str, Callable[[Tensor, Tensor], object]]:
    """The copies that this device can run; Triton compiles for GPUs alone."""
    copies: dict[str, Callable[[Tensor, Tensor], object]] = {"torch": lambda out, x: out.copy_(x)}
    if setting.device.kind == "cpu":
        setting.tell(0.1, "Triton's copy needs a GPU: torch's alone is measured")
        return copies
    try:
        from kernels.copy import copy_into
    except ImportError:
        setting.tell(
            0.1, "Triton is not installed (it has no build for macOS and Windows): torch's copy alone is measured"
        )
        return copies
    return copies | {"triton": copy_into}
