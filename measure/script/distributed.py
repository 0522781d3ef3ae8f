"""One rank of many: a process group that copies nothing, and DistributedDataParallel's buckets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from calc.units import MiB
from measure.script.make_believe_gpu import Patches
from measure.script.recorder import ScriptRecorder

_FIRST_BUCKET = MiB  # torch.distributed's _DEFAULT_FIRST_BUCKET_BYTES


def one_of_many_ranks(patches: Patches, recorder: ScriptRecorder, ranks: int) -> None:
    """Let torch.distributed answer as rank 0 of so many, and the environment say so where there is more than one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start = dist.init_process_group

    def started(*args: Any, **kwargs: Any) -> None:
        start("fake", store=FakeStore(), rank=0, world_size=ranks)

    patches.set(dist, "init_process_group", started)
    patches.set(dist.distributed_c10d, "init_process_group", started)
    patches.set(nn.parallel, "DistributedDataParallel", _Replica)
    patches.set(nn.parallel.distributed, "DistributedDataParallel", _Replica)
    patches.also(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    if ranks > 1:
        known = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        kept = dict(os.environ)
        os.environ.update(known, MASTER_ADDR="localhost", MASTER_PORT="29500")
        patches.also(lambda: _restore(kept))


def _restore(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


class _Replica(nn.Module):
    """DistributedDataParallel's memory: its buckets hold every gradient once more, or are the gradients as views."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise ValueError(
                "Default process group has not been initialized, please make sure to call init_process_group."
            )
        self.module = module
        trained = [each for each in reversed(list(module.parameters())) if each.requires_grad]
        cap = int(25 * MiB if bucket_cap_mb is None else bucket_cap_mb * MiB)
        self._buckets = [_bucket(group, gradient_as_bucket_view) for group in _groups(trained, cap)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()


def _groups(parameters: list[nn.Parameter], cap: int) -> Iterator[list[nn.Parameter]]:
    """Parameters by bucket: a bucket of one dtype closes once it has its limit, the first at 1 MiB."""
    open_: dict[torch.dtype, list[nn.Parameter]] = {}
    limits: dict[torch.dtype, int] = {}
    for parameter in parameters:
        group = open_.setdefault(parameter.dtype, [])
        group.append(parameter)
        if sum(each.nbytes for each in group) >= limits.get(parameter.dtype, _FIRST_BUCKET):
            yield open_.pop(parameter.dtype)
            limits[parameter.dtype] = cap
    yield from open_.values()


def _bucket(parameters: list[nn.Parameter], views: bool) -> torch.Tensor:
    first = parameters[0]
    flat = torch.zeros(sum(each.numel() for each in parameters), dtype=first.dtype, device=first.device)
    at = 0
    for parameter in parameters if views else ():
        view = flat[at : at + parameter.numel()].view(parameter.shape)
        parameter.register_post_accumulate_grad_hook(partial(_as_view, view))  # type: ignore[no-untyped-call]
        at += parameter.numel()
    return flat


def _as_view(view: torch.Tensor, parameter: nn.Parameter) -> None:
    parameter.grad = view
