"""States of a decoder that several ranks train together: what each rank holds, by formula and by the storages of its own tensors.

Rank 0's prediction is calc.training's: the largest share. Shares of whole rows leave less, or nothing, to the last ranks, and
their predictions follow `torch.chunk`'s rule. Step counters (4 bytes a tensor, on the host) are left out on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from calc.measurements.records import Measured
from calc.model.config import from_config
from calc.training import TrainingPlan, train
from calc.training.stage_memory import StageMemory
from calc.training.states.sharding import group_bytes, rules
from calc.training.states.tensors import Tensor as Weight
from calc.units import ceil_div
from measure.distributed.group import Group
from measure.workloads.decoder_states import Size

STEPS: Final = 2  # the first makes the optimizer's state, and DDP's final buckets
DTYPES: Final = {"fp32": torch.float32, "fsdp-bf16": torch.float32, "pure-bf16": torch.bfloat16}


class States(NamedTuple):
    """Exact bytes of one rank, no allocator's rounding."""

    parameters: int
    gradients: int
    optimizer: int


def memory_of(size: Size, **plan: Any) -> StageMemory:
    """calc.training's memory of one rank for this decoder. InputError when the plan does not fit it, as its message says."""
    given = {"seq": size.seq, "micro_batch": size.batch, **plan}
    return train(from_config(size.config), TrainingPlan(**given)).worst


def predicted(memory: StageMemory) -> States:
    """The states of the rank that holds most, by calc.training, before an allocator rounds them."""
    exact = [[count * each for each in group_bytes(tensors, memory.key).exact] for tensors, count in memory.groups]
    return States(*(sum(column) for column in zip(*exact, strict=True)))


def rows_on(rank: int, rows: int, ranks: int) -> int:
    """How many of the rows `torch.chunk` gives to a rank: ceil(rows / ranks) each until they run out."""
    share = ceil_div(rows, ranks)
    return max(0, min(share, rows - rank * share))


def predicted_on(rank: int, memory: StageMemory, elements: Callable[[Weight, bool], int]) -> States:
    """The states of one rank: `elements(tensor, moments)` says how much of a tensor (or of its moments) this rank holds."""
    found = dict.fromkeys(States._fields, 0)
    for tensors, count in memory.groups:
        for tensor in tensors.tensors:
            for rule in memory.key.rules(tensor):
                held = elements(tensor, rule.group == "optimizer")
                found[rule.group] += count * rule.bytes * held
    return States(**found)


def tensor_elements(memory: StageMemory) -> list[int]:
    """Elements of every tensor of the model, largest first."""
    found: list[int] = []
    for tensors, count in memory.groups:
        found += count * [tensor.elements for tensor in tensors.tensors]
    return sorted(found, reverse=True)


def dealt(sizes: Iterable[int], ranks: int) -> list[int]:
    """Elements of each rank when tensors are dealt out as torch/distributed/optim/zero_redundancy_optimizer.py does."""
    held = [0] * ranks
    for size in sorted(sizes, reverse=True):
        held[held.index(min(held))] += size
    return held


def moment_bytes(recipe: str) -> int:
    """Bytes of AdamW's states for each element."""
    return sum(rule.bytes for rule in rules(recipe, "adamw") if rule.group == "optimizer")


def decoder(size: Size, dtype: torch.dtype, group: Group) -> LlamaForCausalLM:
    """The decoder, the same weights on every rank."""
    torch.manual_seed(0)
    with group.device:
        model = LlamaForCausalLM(LlamaConfig(**size.config, use_cache=False))
    model.to(dtype=dtype).train()  # type: ignore[call-arg]
    return model


def tokens_of(size: Size, group: Group, seed: int) -> Tensor:
    """A micro-batch; its own for each rank when `seed` is the rank."""
    generator = torch.Generator(group.device).manual_seed(seed)
    shape = (size.batch, size.seq)
    return torch.randint(0, size.config["vocab_size"], shape, device=group.device, generator=generator)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, steps: int = STEPS) -> float:
    """The loss of the first step; after the last one the gradients are still there."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[0]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """Bytes of this rank's storages behind the tensors, by address: shared ones appear once, padding counts."""
    found = (local(tensor).untyped_storage() for tensor in tensors if tensor is not None)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def observed(parameters: Iterable[Tensor], state: Mapping[Any, Mapping[str, Any]]) -> States:
    """What this rank holds of parameters, their gradients and the optimizer's state."""
    held = list(parameters)
    moments = [value for each in state.values() for key, value in each.items() if key != "step"]
    return States(
        sum(storages(held).values()),
        sum(storages(parameter.grad for parameter in held).values()),
        sum(storages(moments).values()),
    )


def rows(group: Group, case: str, expected: Sequence[States], found: States) -> Iterator[Measured]:
    """Every rank's states, predicted against measured: `rank_0/parameters` and so on."""
    for rank, (each, mine) in enumerate(zip(expected, group.gather(tuple(found)), strict=True)):
        for name, predicted_bytes, measured_bytes in zip(States._fields, each, mine, strict=True):
            yield Measured(case, f"rank_{rank}/{name}", predicted_bytes, measured_bytes, "bytes")


def case_of(group: Group, size: str, *parts: str) -> str:
    """What a row's case says: "2 ranks, gloo, small, fp32"."""
    return ", ".join((f"{group.size} ranks", group.backend, size, *parts))
