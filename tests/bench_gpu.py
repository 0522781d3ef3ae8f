"""`make bench-gpu`: each Triton kernel against the vendor's program on this machine's GPU, medians of one run, against their targets.

Nothing here can fail a build. The bandwidth roof is what torch's own copy of 2 GiB reaches in the same run; the data sheet's is printed
with it. Not run on a GPU yet: its table is tested in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from calc.units import GB, GiB
from measure.devices import Device, resolve, why_no_gpu, why_no_triton
from measure.setting import Setting
from measure.timing import Spread, time_call
from measure.workloads.cases import timed_size
from measure.workloads.inference import paged
from measure.workloads.kernel_rows import sheet_roofs
from measure.workloads.memory_bound_kernels import OPERATIONS, Given

Clock = Callable[[Callable[[], object]], Spread]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is timed: bytes of a copy; the side of a square matmul; (batch, heads, s, d) of attention; rows and columns of the rest."""

    copied: int = 2 * GiB
    matmul: int = 8192
    attention: tuple[int, int, int, int] = (4, 16, 4096, 128)
    rows: int = 8192
    columns: int = 8192


class Line(NamedTuple):
    """One kernel: its time and the vendor's, and how near it comes to the vendor (`of` "torch") or to the roof (`of` "roof").

    `target` is the least share that is wanted of it; None where none was set."""

    name: str
    ours: Spread
    vendors: Spread
    of: str
    share: float
    target: float | None

    def text(self) -> str:
        verdict = "" if self.target is None else "met" if self.share >= self.target else "MISSED"
        wanted = "" if self.target is None else f"{self.target:.2f}"
        times = f"{self.ours.median * 1e3:10.3f}{self.vendors.median * 1e3:10.3f}"
        return f"{self.name:<36}{times}{self.share:8.2f} of {self.of:<6}{wanted:>6}  {verdict}".rstrip()


HEADER = f"{'':<36}{'Triton ms':>10}{'torch ms':>10}{'share':>8}    {'':<6}{'target':>6}"
# least shares of the bandwidth roof; the other operations are told without one
OF_ROOF = {"RMSNorm": 0.9, "softmax": 0.9, "cross-entropy": 0.9, "AdamW": 0.9, "paged decode": 0.8}


def lines(device: Device, sizes: Sizes, clock: Clock) -> Iterator[Line]:
    """Every kernel that has a target, and the others that memory bounds."""
    where = torch.device(device.name)
    torch.manual_seed(0)
    copied = _copy(where, sizes.copied, clock)
    yield copied
    roof = 2 * sizes.copied / copied.vendors.median
    yield _matmul(where, sizes.matmul, clock)
    for causal in (False, True):
        yield from _attention(where, sizes.attention, causal, clock)
    for make in OPERATIONS:
        made = make(Given(where, sizes.rows, sizes.columns, with_triton=True))
        assert made.triton
        ours, vendors = clock(made.triton), clock(made.torch)
        yield Line(made.name, ours, vendors, "roof", made.nbytes / ours.median / roof, OF_ROOF.get(made.name))
    for title, decode in paged(timed_size(Setting(device, "small", lambda fraction, message: None))):
        step = decode(1)
        ours, vendors = clock(step.programs["triton"]), clock(step.programs["torch"])
        name = "paged decode, latents" if "latents" in title else "paged decode"
        yield Line(name, ours, vendors, "roof", step.nbytes / ours.median / roof, OF_ROOF.get(name))


def _of_torch(name: str, ours: Spread, vendors: Spread, target: float) -> Line:
    return Line(name, ours, vendors, "torch", vendors.median / ours.median, target)


def _copy(where: torch.device, nbytes: int, clock: Clock) -> Line:
    from kernels.copy import copy_into

    x = torch.randn(nbytes // 2, device=where).to(torch.bfloat16)
    out = torch.empty_like(x)
    return _of_torch("copy", clock(partial(copy_into, out, x)), clock(partial(out.copy_, x)), 0.95)


def _matmul(where: torch.device, side: int, clock: Clock) -> Line:
    from kernels.matmul import matmul

    a, b = (torch.randn(side, side, device=where).to(torch.bfloat16) for _ in range(2))
    return _of_torch(
        f"matmul bf16, {side}", clock(partial(matmul, a, b.t())), clock(partial(torch.matmul, a, b.t())), 0.9
    )


def _attention(where: torch.device, shape: tuple[int, int, int, int], causal: bool, clock: Clock) -> Iterator[Line]:
    from kernels.flash_attention import flash_attention

    q, k, v = (torch.randn(shape, device=where).to(torch.bfloat16).requires_grad_() for _ in range(3))

    def vendors() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def back(out: Tensor) -> Callable[[], object]:
        return partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)

    ours = partial(flash_attention, q, k, v, causal=causal)
    name = f"flash attention{', causal' if causal else ''}"
    with torch.no_grad():
        yield _of_torch(f"{name}, forward", clock(ours), clock(vendors), 0.85)
    yield _of_torch(f"{name}, backward", clock(back(ours())), clock(back(vendors())), 0.7)


def main() -> None:
    """Print the table, or why there is none."""
    missing = why_no_gpu() or why_no_triton()
    if missing:
        print(f"bench-gpu: nothing was timed; {missing}")
        return
    device = resolve("cuda")
    sheet = sheet_roofs(device, torch.bfloat16).bandwidth
    known = f"{sheet / GB:,.0f} GB/s" if sheet else "unknown"
    print(f"{device.title}; the roof is torch's copy of this run, the data sheet's bandwidth is {known}\n{HEADER}")
    with torch.cuda.device(device.name):
        for line in lines(device, Sizes(), partial(time_call, device=torch.device(device.name), seconds=1.0)):
            print(line.text(), flush=True)


if __name__ == "__main__":
    main()
