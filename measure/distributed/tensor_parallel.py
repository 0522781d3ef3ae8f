"""States of a decoder under parallelize_module: tp = N, projections by columns and rows, embedding and head by vocabulary.

The loss of the divided model is compared with the whole model's: the same program, or the bytes mean nothing. Weights are padded to
the same rows on every rank, gradients and moments are not. PyTorch 2.13 leaves the embedding's gradient whole on every rank (a
RowwiseParallel embedding gives a replicated one); calc.training, like Megatron, counts a share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from calc.errors import InputError
from calc.measurements.records import Measured
from calc.training.stage_memory import StageMemory
from calc.training.states.tensors import Tensor
from measure.distributed import states
from measure.distributed.group import Group
from measure.workloads.decoder_states import SIZES, Size

RECIPES: Final = ("fp32", "pure-bf16")


def _plan() -> dict[str, ParallelStyle]:
    layer = "model.layers.*"
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"{layer}.{name}": ColwiseParallel() for name in columns},
        **{f"{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")},
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }


def size_for(size: str, ranks: int) -> Size:
    """The decoder with at least one KV head a rank: PyTorch divides the projections' rows, and copies no head.

    InputError when the ranks cannot share its heads.
    """
    found = SIZES[size]
    if found.config["num_attention_heads"] % ranks:
        rule = f"it must divide the {size} decoder's num_attention_heads ({found.config['num_attention_heads']})"
        raise InputError.of("--ranks", ranks, rule)
    heads = max(found.config["num_key_value_heads"], ranks)
    return replace(found, config={**found.config, "num_key_value_heads": heads})


def run(group: Group, size: str) -> Iterator[Measured]:
    """Each rank's states; `largest_share/gradients`, calc.training's figure against the rank that holds most; `loss` of the first step,
    the whole model's against the divided one's. InputError unless N divides the heads."""
    chosen = size_for(size, group.size)
    tokens = states.tokens_of(chosen, group, 0)  # the same on all: they share one model
    for index, recipe in enumerate(RECIPES):
        case = states.case_of(group, size, recipe)
        group.tell(index / len(RECIPES), case)
        whole = states.memory_of(chosen, recipe=recipe)
        divided = states.memory_of(chosen, recipe=recipe, tp=group.size, sequence_parallel=False)
        model = states.decoder(chosen, states.DTYPES[recipe], group)
        with torch.no_grad():
            loss = float(model(input_ids=tokens, labels=tokens).loss)
        parallelize_module(model, init_device_mesh(group.device.type, (group.size,)), _plan())
        # one tensor at a time: norms are plain tensors, the rest distributed, and foreach takes no mixture
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        found = states.trained(model, optimizer, tokens)
        held = states.observed(model.parameters(), optimizer.state)
        expected = [_states_on(rank, whole, divided, group.size) for rank in range(group.size)]
        yield from states.rows(group, case, expected, held)
        most = max(group.gather(held.gradients))
        yield Measured(case, "largest_share/gradients", states.predicted(divided).gradients, most, "bytes")
        yield Measured(case, "loss", loss, found, "nats")


def _states_on(rank: int, whole: StageMemory, divided: StageMemory, ranks: int) -> states.States:
    """The rank's part of each tensor along the dimension that calc.training divides."""
    parts = {(tensors.path, tensor.path): tensor for tensors, _ in divided.groups for tensor in tensors.tensors}
    found = [0, 0, 0]
    for tensors, count in whole.groups:
        for tensor in tensors.tensors:
            part = parts[tensors.path, tensor.path]
            share = _elements_on(rank, tensor, part, ranks)
            gradient = tensor.elements if tensor.path[0] == "embedding" else share
            held = {"parameters": part.elements, "gradients": gradient, "optimizer": share}
            for rule in whole.key.rules(tensor):
                found[states.States._fields.index(rule.group)] += count * rule.bytes * held[rule.group]
    return states.States(*found)


def _elements_on(rank: int, tensor: Tensor, part: Tensor, ranks: int) -> int:
    if part.first != tensor.first:
        return states.rows_on(rank, tensor.first, ranks) * tensor.rest
    if part.rest != tensor.rest:
        return tensor.first * states.rows_on(rank, tensor.rest, ranks)
    return tensor.elements
