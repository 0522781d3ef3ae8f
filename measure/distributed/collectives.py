"""Collectives by size: bytes that a rank sends, by the ring formulas and as the kernel counts them, time, and bus bandwidth.

`bytes` is the whole buffer: all-gather's output, reduce-scatter's input, what a rank puts into the others. Bus bandwidth is the
formula's bytes over the time, which is what the slowest link carries if the algorithm is a ring (nccl-tests counts it so too).
gloo's algorithms are not all rings: its broadcast is a tree whose root sends several times, and the rows show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch import distributed as dist

from calc.measurements.records import Measured
from calc.units import GB, GiB, KiB, MiB, show_bytes
from measure.distributed.group import Group
from measure.distributed.traffic import bytes_sent
from measure.timing import spread

SIZES: Final[Mapping[str, tuple[int, ...]]] = {
    "small": (64 * KiB, MiB, 8 * MiB),
    "medium": (MiB, 64 * MiB, GiB // 2),
}
_REPEATS: Final = 11
_WARM_UP: Final = 2
_DTYPE: Final = torch.float32


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation. A rank sends `whole` times the buffer, or `shares(n)` n-ths of it where n ranks divide it."""

    name: str
    shares: Callable[[int], int]  # of n: how many n-ths of the buffer a rank sends in a ring
    call: Callable[[Group, Tensor, Tensor], object]  # the buffer, and one of the same size to write into


def _part(group: Group, buffer: Tensor) -> Tensor:
    return buffer.chunk(group.size)[group.rank]


# nccl-tests, doc/PERFORMANCE.md, gives the same factors
COLLECTIVES: Final = (
    Collective("broadcast", lambda n: n, lambda group, a, b: dist.broadcast(a, 0)),
    Collective("reduce", lambda n: n, lambda group, a, b: dist.reduce(a, 0)),
    Collective("all-reduce", lambda n: 2 * (n - 1), lambda group, a, b: dist.all_reduce(a)),
    Collective("all-gather", lambda n: n - 1, lambda group, a, b: dist.all_gather_single(b, _part(group, a))),
    Collective("reduce-scatter", lambda n: n - 1, lambda group, a, b: dist.reduce_scatter_single(_part(group, b), a)),
    Collective("all-to-all", lambda n: n - 1, lambda group, a, b: dist.all_to_all_single(b, a)),
)


def run(group: Group, size: str) -> Iterator[Measured]:
    """For each size and collective: `NAME/sent` bytes of the busiest rank, `NAME/time` seconds, `NAME/bus_bandwidth` in GB/s."""
    steps = len(SIZES[size]) * len(COLLECTIVES)
    for index, nbytes in enumerate(SIZES[size]):
        elements = nbytes // _DTYPE.itemsize // group.size * group.size  # ranks get equal parts
        for turn, collective in enumerate(COLLECTIVES):
            group.tell((index * len(COLLECTIVES) + turn) / steps, f"{collective.name}, {show_bytes(nbytes, 0)}")
            yield from _measured(group, collective, elements)


def _measured(group: Group, collective: Collective, elements: int) -> Iterator[Measured]:
    # zeros: sums stay in range however often they are repeated
    buffer = torch.zeros(elements, dtype=_DTYPE, device=group.device)
    out = torch.zeros_like(buffer)

    def call() -> object:
        return collective.call(group, buffer, out)

    sent = _sent(group, call)  # the first calls; they also make the connections
    times = spread(group.times(call, _REPEATS))
    case = f"{group.size} ranks, {group.backend}, {show_bytes(buffer.nbytes, 0)}"
    predicted = collective.shares(group.size) * buffer.nbytes // group.size
    yield Measured(case, f"{collective.name}/sent", predicted, sent, "bytes")
    yield Measured(case, f"{collective.name}/time", None, times.median, "seconds", times.p20, times.p80)
    p20, middle, p80 = (predicted / seconds / GB for seconds in reversed(times))
    yield Measured(case, f"{collective.name}/bus_bandwidth", None, middle, "GB/s", p20, p80)


def _sent(group: Group, call: Callable[[], object]) -> int | None:
    """Bytes that the busiest rank sends in one call, messages' headers included; what the barriers send is taken off."""
    for _ in range(_WARM_UP):
        call()
    counts: list[int | None] = []
    for work in (None, call):
        group.wait_for_all()
        before = bytes_sent()
        if work:
            work()
        group.wait_for_all()
        after = bytes_sent()
        counts.append(None if before is None or after is None else after - before)
    barrier, whole = counts
    mine = None if group.backend != "gloo" or barrier is None or whole is None else whole - barrier
    everyones = group.gather(mine)
    known = [each for each in everyones if each is not None]
    return max(known) if len(known) == group.size else None
