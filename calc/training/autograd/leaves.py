"""Storages and constants as leaves of a breakdown, with the formula and the source of the program that makes them."""

from __future__ import annotations

from dataclasses import dataclass

from calc.breakdown import Component, Formula, Number
from calc.training.autograd.blocks import Block, Sizes, alive_at, block_bytes, storage_bytes
from calc.training.autograd.segments import Segment
from calc.training.autograd.tape import Storage
from calc.training.plan import TrainingPlan
from calc.training.states.sharding import GRANULE, tree
from calc.training.states.tensors import Tensors
from calc.units import round_up


@dataclass(frozen=True, slots=True)
class Source:
    """Where a ledger's rows come from."""

    text: str
    url: str


def rounded_leaf(name: str, exact: int, latex: str, numbers: dict[str, Number], source: Source) -> Component:
    """A leaf of so many exact bytes, rounded up as the allocator does."""
    value = round_up(exact, GRANULE)
    latex = latex if value == exact else rf"512 \cdot \lceil \frac{{{latex}}}{{512}} \rceil"
    return Component(name, value, formula=Formula(latex, source.text, source.url), numbers=numbers)


def block_segment(
    path: tuple[str, ...], block: Block, sizes: Sizes, tensors: Tensors, plan: TrainingPlan, source: Source
) -> Segment:
    """A block with its numbers."""

    def kept(cached: bool = False) -> tuple[Component, ...]:
        numbers = (*block.kept, *block.cached) if cached else block.kept
        return storage_tree([block.storages[number] for number in numbers], sizes, plan, source)

    def live_parts(phase: str, accumulating: bool) -> tuple[Component, ...]:
        return storage_tree(alive_at(block, sizes, phase, accumulating), sizes, plan, source)

    return Segment(path, block_bytes(block, sizes), tensors, 0 in block.kept, kept, live_parts, (block, sizes))


def storage_tree(
    storages: tuple[Storage, ...] | list[Storage], sizes: Sizes, plan: TrainingPlan, source: Source
) -> tuple[Component, ...]:
    """Storages as leaves under the names of the modules that made them; equal names are numbered."""
    seen: dict[tuple[str, ...], int] = {}
    leaves = []
    for storage in storages:
        again = seen[storage.name] = seen.get(storage.name, 0) + 1
        name = storage.name if again == 1 else (*storage.name[:-1], f"{storage.name[-1]}_{again}")
        leaves.append((name, _leaf(name[-1], storage, sizes, plan, source)))
    return tree(leaves)


def _leaf(name: str, storage: Storage, sizes: Sizes, plan: TrainingPlan, source: Source) -> Component:
    extent, numbers = storage.extent, dict(storage.dim.numbers)
    factors = [str(storage.bytes)]
    if extent.batch:
        factors.append("<b>")
        numbers["b"] = sizes.batch
    if extent.sequence:
        pairs = rf"<s> \cdot (<s> + {extent.more})" if extent.more else "<s>^{2}"
        factors.append("<s>" if extent.sequence == 1 else pairs)
        numbers["s"] = sizes.tokens
    if storage.dim.latex != "<1>":
        factors.append(storage.dim.latex)
    latex = r" \cdot ".join(factors)
    if extent.shards > 1:
        divided = r" \cdot ".join(factors[1:])
        latex = rf"{factors[0]} \cdot \lceil \frac{{{divided}}}{{<t>}} \rceil"
        numbers["t"] = extent.shards
    value = storage_bytes(storage, sizes)
    exact = storage_bytes(storage, sizes._replace(granule=1))
    if exact != value:
        latex = rf"512 \cdot \lceil \frac{{{latex}}}{{512}} \rceil"
    assumes = ("s: tokens of a sequence on this device, s / c under context parallelism",) if plan.cp > 1 else ()
    used = {letter: number for letter, number in numbers.items() if f"<{letter}>" in latex}
    return Component(name, value, formula=Formula(latex, source.text, source.url, assumes), numbers=used)
