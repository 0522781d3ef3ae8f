"""How fast matrices multiply and memory copies: torch's kernels against Triton's, against the data sheet.

The data sheet's figure is a peak; what is reached of it is the finding, and what calibration takes. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from calc.measurements.records import Measured
from calc.units import GiB, MiB
from measure.setting import Setting
from measure.timing import time_call
from measure.workloads.cases import Case, each, timed_size
from measure.workloads.kernel_rows import FORMATS, bandwidth_row, intensity_row, rate_row, sheet_roofs, with_triton

# M, K, N: squares, and few rows as in decoding
_SHAPES: Final = {
    "small": ((256, 256, 256), (512, 512, 512), (16, 512, 512)),
    "medium": ((4096, 4096, 4096), (8192, 8192, 8192), (16, 8192, 8192)),
}
_OUT: Final = {torch.int8: 4, torch.float8_e4m3fn: 2}  # bytes of an element of the product, where not the operands'
# bytes of each tensor: two of them are well above the last cache of a GPU (50 MB on an H100, 256 MB on an MI300X)
_BYTES: Final = {"small": (256 * MiB, "256 MiB"), "medium": (2 * GiB, "2 GiB")}

Matmul = Callable[[Tensor, Tensor], Tensor]
Fill = Callable[[Tensor, Tensor, Tensor], object]


def matmul_rate(setting: Setting) -> Iterator[Measured]:
    """One `rate/FORMAT/PROGRAM` a shape, format and program that this device has, in 10**12 FLOP/s."""
    setting = timed_size(setting)
    cases = [Case(f"{m}×{k}×{n}", partial(_products, setting, (m, k, n))) for m, k, n in _SHAPES[setting.size]]
    return each(setting, cases)


def _products(setting: Setting, shape: tuple[int, int, int], divisor: int) -> Iterator[Measured]:
    m, k, n = (max(16, side // divisor) for side in shape)
    device = torch.device(setting.device.name)
    torch.manual_seed(0)
    for dtype, program, matmul in _matmuls(setting, m):
        a, b = _filled(m, k, dtype, device), _filled(n, k, dtype, device).t()  # as a linear layer's weight lies
        times = time_call(partial(matmul, a, b), device, seconds=0.15)
        flops = 2 * m * n * k
        nbytes = (m * k + k * n) * dtype.itemsize + m * n * _OUT.get(dtype, dtype.itemsize)
        name = f"{FORMATS[dtype]}/{program}"
        yield rate_row(name, times, flops, sheet_roofs(setting.device, dtype).flops)
        yield intensity_row(name, flops, nbytes)


def _filled(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, (rows, columns), dtype=dtype, device=device)
    return torch.randn(rows, columns, device=device).to(dtype)


def _matmuls(setting: Setting, rows: int) -> Iterator[tuple[torch.dtype, str, Matmul]]:
    """What multiplies so many rows here: format, whose program, and the call."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield dtype, "torch", torch.matmul
    if rows > 16 or setting.device.kind == "cpu":  # cuBLAS's int8 takes 17 rows or more
        yield torch.int8, "torch", torch._int_mm
    if setting.device.kind == "cpu":
        return
    capability = torch.cuda.get_device_capability(setting.device.name)
    has_fp8 = setting.device.kind == "cuda" and capability >= (8, 9)  # AMD's cards have another e4m3
    if has_fp8:
        one = torch.ones((), device=setting.device.name)
        scaled: Any = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        yield torch.float8_e4m3fn, "torch", scaled
    if not with_triton(setting.device):
        return
    from kernels.matmul import OUTPUTS, matmul

    for dtype in OUTPUTS:
        if has_fp8 or dtype != torch.float8_e4m3fn:
            yield dtype, "triton", matmul


def memory_bandwidth(setting: Setting) -> Iterator[Measured]:
    """`bandwidth/copy/...` (2·N·itemsize bytes) and `bandwidth/triad/...` (3·N·itemsize), in 10**9 bytes/s."""
    nbytes, title = _BYTES[setting.size]
    cases = [
        Case(f"{title}, bf16", lambda divisor: _fills(setting, _copies(setting), 2, nbytes // divisor, torch.bfloat16)),
        Case(f"{title}, fp32", lambda divisor: _fills(setting, _triads(setting), 3, nbytes // divisor, torch.float32)),
    ]
    return each(setting, cases)


_SCALE: Final = 3.0


def _triads(setting: Setting) -> Mapping[str, Fill]:
    """The triads that this device can run."""
    triads: dict[str, Fill] = {"triad/torch": lambda out, x, y: torch.add(x, y, alpha=_SCALE, out=out)}
    if not with_triton(setting.device):
        return triads
    from kernels.triad import triad_into

    return triads | {"triad/triton": lambda out, x, y: triad_into(out, x, y, _SCALE)}


def _copies(setting: Setting) -> Mapping[str, Fill]:
    """The copies that this device can run; Triton compiles for GPUs alone."""
    copies: dict[str, Fill] = {"copy/torch": lambda out, x, y: out.copy_(x)}
    if not with_triton(setting.device):
        return copies
    from kernels.copy import copy_into

    return copies | {"copy/triton": lambda out, x, y: copy_into(out, x)}


def _fills(
    setting: Setting, fills: Mapping[str, Fill], tensors: int, nbytes: int, dtype: torch.dtype
) -> Iterator[Measured]:
    """Each fill of `out` from x (and y, where three tensors move), timed and then checked."""
    device = torch.device(setting.device.name)
    torch.manual_seed(0)
    x, *more = (_noise(nbytes, dtype, device) for _ in range(tensors - 1))
    y = more[0] if more else x
    out = torch.empty_like(x)
    right = x + _SCALE * y if more else x
    for name, fill in fills.items():
        out.fill_(float("nan"))
        times = time_call(partial(fill, out, x, y), device, seconds=0.5)
        if not torch.allclose(out, right, rtol=1e-6 if more else 0, atol=1e-6 if more else 0):
            raise RuntimeError(f"{name} is not equal to what it should be")
        yield bandwidth_row(name, times, tensors * nbytes, sheet_roofs(setting.device, dtype).bandwidth)
        if more:
            yield intensity_row(name, 2 * x.numel(), tensors * nbytes)


def _noise(nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of so many bytes, one block of noise again and again: zeros could compress, or run cooler."""
    block = torch.randn(min(nbytes, MiB) // dtype.itemsize, device=device).to(dtype)
    return block.repeat(nbytes // block.nbytes)
