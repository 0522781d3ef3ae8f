"""One rank's view of the group that it measures in: who it is, what it computes on, how to reach the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import FileStore

Value = TypeVar("Value")
_PATIENCE = timedelta(seconds=300)  # for a rank that does not come: then the call fails instead of waiting for ever


@dataclass(frozen=True, slots=True)
class Group:
    """`rank` of `size` ranks on `device`. `tell(fraction, message)` reports progress, and only rank 0 is heard."""

    rank: int
    size: int
    device: torch.device
    tell: Callable[[float, str], None]

    @property
    def backend(self) -> str:
        return "gloo" if self.device.type == "cpu" else "nccl"

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in the order of ranks, on every rank."""
        found: list[Value] = [value] * self.size
        dist.all_gather_object(found, value)
        return found

    def wait_for_all(self) -> None:
        """Return once every rank is here, its queued work done."""
        self.finish()
        dist.barrier()
        self.finish()

    def finish(self) -> None:
        """Return once this rank's device has done what was queued on it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def times(self, call: Callable[[], object], repeats: int) -> list[float]:
        """Seconds of each of so many calls that all ranks make together: from a common start to the end of the slowest."""
        found = []
        for _ in range(repeats):
            self.wait_for_all()
            start = time.perf_counter()
            call()
            self.finish()
            found.append(time.perf_counter() - start)
        return [max(each) for each in zip(*self.gather(found), strict=True)]


@contextmanager
def joined(kind: str, store: str, tell: Callable[[float, str], None]) -> Iterator[Group]:
    """The group that torchrun's environment variables describe, left again at the end. `kind` is a device's ("cpu", "cuda", "rocm").

    `store` is a file through which the ranks of one machine find each other; "" when they meet at torchrun's address.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = Group(rank, size, device, tell)
    dist.init_process_group(
        group.backend,
        timeout=_PATIENCE,
        store=FileStore(store, size) if store else None,
        rank=rank,
        world_size=size,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield group
    finally:
        dist.destroy_process_group()
