"""Shards under fully_shard (FSDP2): dp = N, ZeRO-3, a group a layer and one for the rest.

Weights and gradients are shards of whole rows, padded to the same size on every rank; moments are not padded. What is gathered
after forward is read from FSDP2's own buffers: the root's group always, the layers' too without resharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from calc.measurements.records import Measured
from calc.training.stage_memory import StageMemory
from calc.training.states.recipes import RECIPES
from calc.training.states.tensors import Tensor
from measure.distributed import states
from measure.distributed.group import Group
from measure.workloads.decoder_states import SIZES

CASES = (("fsdp-bf16", True), ("fsdp-bf16", False), ("pure-bf16", True), ("pure-bf16", False))


def run(group: Group, size: str) -> Iterator[Measured]:
    """Each rank's states, then `gathered_after_forward`: full weights that stay between forward and backward."""
    for index, (recipe, reshard) in enumerate(CASES):
        case = states.case_of(group, size, recipe, f"reshard_after_forward={reshard}")
        group.tell(index / len(CASES), case)
        yield from _measured(group, size, recipe, reshard, case)


def _measured(group: Group, size: str, recipe: str, reshard: bool, case: str) -> Iterator[Measured]:
    layout: dict[str, Any] = {"dp": group.size, "zero": 3, "recipe": recipe, "reshard_after_forward": reshard}
    memory = states.memory_of(SIZES[size], **layout)
    model = _sharded(group, size, recipe, reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = states.tokens_of(SIZES[size], group, group.rank)
    states.trained(model, optimizer, tokens)
    expected = [_states_on(rank, memory, group.size) for rank in range(group.size)]
    yield from states.rows(group, case, expected, states.observed(model.parameters(), optimizer.state))
    model(input_ids=tokens, labels=tokens)
    most = max(group.gather(_gathered(model)))
    yield Measured(case, "gathered_after_forward", _gathered_by_formula(memory, group.size, reshard), most, "bytes")


def _sharded(group: Group, size: str, recipe: str, reshard: bool) -> nn.Module:
    model = states.decoder(SIZES[size], states.DTYPES[recipe], group)
    computes = torch.bfloat16 if RECIPES[recipe].gathered else None
    policy = MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=torch.float32 if computes else None)
    mesh = init_device_mesh(group.device.type, (group.size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # left to itself, FSDP2 keeps the root's group: backward begins with it
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=None if reshard else False)
    return model


def _states_on(rank: int, memory: StageMemory, ranks: int) -> states.States:
    def elements(tensor: Tensor, moments: bool) -> int:
        held = states.rows_on(rank, tensor.first, ranks) if moments else states.rows_on(0, tensor.first, ranks)
        return held * tensor.rest

    return states.predicted_on(rank, memory, elements)


def _gathered_by_formula(memory: StageMemory, ranks: int, reshard: bool) -> int:
    """n padded shards of each tensor, in the format that layers compute in."""
    width = RECIPES[memory.plan.recipe].compute
    total = 0
    for tensors, count in memory.groups:
        if not (reshard and tensors.path[:1] == ("layers",)):
            for tensor in tensors.tensors:
                total += count * width * ranks * states.rows_on(0, tensor.first, ranks) * tensor.rest
    return total


def _gathered(model: nn.Module) -> int:
    """Bytes in the buffers of gathered weights now: FSDP2 gives their storage back when it reshards."""
    found: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group else ():
                found |= states.storages([*parameter.all_gather_outputs, getattr(parameter, "_unsharded_param", None)])
    return sum(found.values())
