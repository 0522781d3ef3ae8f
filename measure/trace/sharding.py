"""Data parallelism in the traced program: FSDP2 over a process group that only says its size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from calc.errors import InputError
from measure.trace.model import Stack
from measure.trace.options import TraceOptions

_POLICIES = {"fsdp-bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@contextlib.contextmanager
def process_group(ranks: int) -> Iterator[DeviceMesh]:
    """Within it this process is rank 0 of so many. Collectives copy nothing: a trace looks at no values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module, stack: Stack, mesh: DeviceMesh, options: TraceOptions) -> None:
    """Shard the parameters by FSDP2: one group a decoder layer, and one of all the rest."""
    if not stack.path:
        raise InputError.of("zero", 3, f"{type(model).__name__} has no stack of layers to shard one by one")
    policy = _POLICIES.get(options.recipe, MixedPrecisionPolicy())
    for module in (*model.get_submodule(stack.path).children(), model):
        # left to itself FSDP2 frees what it gathers for a layer, and keeps what it gathers for the root
        reshard = None if options.reshard_after_forward else False
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def gathered_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The whole parameters that FSDP2 has gathered once, with their module and name there, whether freed again or not."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    for gathered in parameter.all_gather_outputs:
                        yield parameter._module_info.module, parameter._module_info.param_name, gathered
