"""Bytes that the optimizer's step makes and frees again, by PyTorch's kernel for it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from calc.training.states.recipes import OPTIMIZERS
from calc.training.states.sharding import Placed, StateKey
from calc.training.states.tensors import Tensor, Tensors
from calc.units import round_up

_HALF = 2  # bytes of bf16, in which Muon's iteration runs


class StepBytes(NamedTuple):
    """Of a group of tensors on one device, storages rounded up: copies of all at once (`foreach`), those of one tensor at a
    time at most (`loop`), and what Muon, which has no other form than a loop, makes of one hidden matrix at most."""

    foreach: int
    loop: int
    matrix: int


@lru_cache(maxsize=4096)
def group_step(tensors: Tensors, key: StateKey) -> StepBytes:
    """What the step makes of a group: copies as wide as its last moment. Cached: a group hashes by identity."""
    ledger, copies, matrices = OPTIMIZERS[key.optimizer], dict[str, int](), dict[str, list[tuple[Tensor, int]]]()
    for tensor in tensors.tensors:
        for rule in key.rules(tensor):
            if (rule.name,) != ledger.moments[-1:]:
                continue
            storage = key.storage(tensor)
            if ledger.vectors_adamw and tensor.matrix:
                matrices.setdefault(storage, []).append((tensor, rule.bytes))
                continue
            whole = key.bytes(tensor, replace(rule, kind="plain") if rule.kind == "factored" else rule)
            copies[storage] = copies.get(storage, 0) + whole
    plain = OPTIMIZERS["adamw"] if ledger.vectors_adamw else ledger
    sizes = [round_up(size, key.granule) for size in copies.values()]
    loop = max((plain.loop * own + plain.bound * before for before, own in pairwise([0, *sizes])), default=0)
    matrix = max((_orthogonalised(parts, key.granule) for parts in matrices.values()), default=0)
    return StepBytes(plain.foreach * sum(sizes), loop, matrix)


def _orthogonalised(parts: list[tuple[Tensor, int]], granule: int) -> int:
    """Muon's step of one matrix (torch/optim/_muon.py): the update, its iterate before and after in bf16, and two products of
    its shorter side with itself. Ranks that share the matrix gather it: the iteration needs all of it."""
    elements = sum(tensor.elements for tensor, _ in parts)
    first, width = parts[0]
    shorter = min(sum(tensor.first for tensor, _ in parts), first.rest)
    iterate, product = _HALF * elements, _HALF * first.copies * shorter**2
    return sum(round_up(size, granule) for size in (width * elements, iterate, iterate, product, product))


def one_weight_step(groups: tuple[Placed, ...], key: StateKey, kernel: str) -> int:
    """The gradient of the largest weight and what its update makes of it, where each is updated inside backward."""
    ledger = OPTIMIZERS[key.optimizer]
    copies = {"foreach": ledger.foreach, "loop": ledger.loop, "fused": 0}[kernel]
    sizes = (
        key.bytes(tensor, rule) * (1 + copies)
        for tensors, _ in groups
        for tensor in tensors.tensors
        for rule in key.rules(tensor)
        if rule.group == "gradients"
    )
    return max(sizes, default=0)
