"""Blocks of the transformers program (a layer, the head with the loss, the embedding) as events, read with numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from calc.model.weights import Dim
from calc.training.autograd.builder import Builder
from calc.training.autograd.tape import Edge, Extent, Storage, Value
from calc.units import round_up


class Sizes(NamedTuple):
    """What the letters b and s stand for on one device, and the allocator's granule."""

    batch: int
    tokens: int  # of one sequence on this device (s / c)
    granule: int


@dataclass(frozen=True, eq=False)
class Block:
    """A block's storages and what happens to them: n allocates storage n, ~n frees it.

    Storage 0 is the block's input, alive when forward begins; the output lives on when it ends, with what is `kept`.
    Backward begins with `kept` and the output's gradient, and ends with the input's.
    """

    name: tuple[str, ...]
    storages: tuple[Storage, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    kept: tuple[int, ...]
    output: int
    output_gradient: int  # -1 where no gradient comes back
    input_gradient: int  # -1 where none is asked for
    cached: tuple[int, ...] = ()  # 16-bit copies of weights that autocast keeps to the end of forward, for nothing else
    asks: int = 0  # events of backward before an operator first asks for what it saved

    @cached_property
    def accumulating(self) -> tuple[int, ...]:
        """Backward's events where each gradient of a weight is added to one that is there, and freed at once."""
        weights = frozenset(number for number, storage in enumerate(self.storages) if storage.weight)
        return tuple(each for event in self.backward for each in ((event, ~event) if event in weights else (event,)))

    @cached_property
    def distinct(self) -> tuple[tuple[Storage, ...], tuple[int, ...]]:
        """One storage of each size in letters, and for every storage the place of its like: a layer repeats few sizes often."""
        places: dict[tuple[int, Extent, int], int] = {}
        like = tuple(places.setdefault((s.dim.size, s.extent, s.bytes), len(places)) for s in self.storages)
        return tuple(self.storages[like.index(place)] for place in range(len(places))), like


def storage_bytes(storage: Storage, sizes: Sizes) -> int:
    """Bytes of a storage, rounded up as the allocator does."""
    extent = storage.extent
    elements = storage.dim.size * extent.elements(sizes.batch, sizes.tokens)
    return round_up(-(-elements // extent.shards) * storage.bytes, sizes.granule)


def storage_sizes(block: Block, sizes: Sizes) -> list[int]:
    """Bytes of each of the block's storages."""
    distinct, like = block.distinct
    found = [storage_bytes(storage, sizes) for storage in distinct]
    return list(map(found.__getitem__, like))


class BlockBytes(NamedTuple):
    """A block with numbers. Peaks count from what was alive before the block, its input or its output's gradient included.

    `backward_peak` holds the weights' gradients as they come; `accumulating_peak` adds each to one that is there.
    """

    input: int
    forward_peak: int
    kept: int
    output: int
    backward_peak: int
    accumulating_peak: int
    weight_gradients: int
    input_gradient: int
    fixed: int  # the part of `kept` that does not grow with the batch
    output_gradient: int
    cached: int = 0  # there to the end of forward, besides what is kept


@lru_cache(maxsize=8192)
def block_bytes(block: Block, sizes: Sizes) -> BlockBytes:
    """The block's bytes and peaks."""
    size = storage_sizes(block, sizes)
    change = [*size, *(-each for each in reversed(size))]  # what an event adds: ~n is the n-th from the end
    kept = sum(map(size.__getitem__, block.kept))
    output_gradient = size[block.output_gradient] if block.output_gradient >= 0 else 0
    weights = [number for number in block.backward if number >= 0 and block.storages[number].weight]

    def highest(start: int, events: tuple[int, ...]) -> int:
        return max(accumulate(map(change.__getitem__, events), initial=start))

    return BlockBytes(
        size[0],
        highest(size[0], block.forward),
        kept,
        size[block.output],
        highest(kept + output_gradient, block.backward),
        highest(kept + output_gradient, block.accumulating),
        sum(map(size.__getitem__, weights)),
        size[block.input_gradient] if block.input_gradient >= 0 else 0,
        sum(size[number] for number in block.kept if not block.storages[number].extent.batch),
        output_gradient,
        sum(map(size.__getitem__, block.cached)),
    )


def alive_at(block: Block, sizes: Sizes, phase: str, accumulating: bool) -> tuple[Storage, ...]:
    """The storages alive at the block's highest point of the phase."""
    size = storage_sizes(block, sizes)
    start = (
        [0] if phase == "forward" else [*block.kept, *([block.output_gradient] if block.output_gradient >= 0 else [])]
    )
    live = dict.fromkeys(start)
    total = sum(size[number] for number in live)
    best, found = total, tuple(live)
    for event in block.forward if phase == "forward" else block.backward:
        if event < 0:
            total -= size[~event] if ~event in live else 0
            live.pop(~event, None)
            continue
        live[event] = None
        total += size[event]
        if total > best:
            best, found = total, tuple(live)
        if accumulating and phase == "backward" and block.storages[event].weight:
            del live[event]
            total -= size[event]
    return tuple(block.storages[number] for number in found)


def record(
    builder: Builder,
    name: tuple[str, ...],
    program: Callable[[list[Value]], Value],
    width: Dim,
    extent: Extent,
    size: int,
    trains: bool,
) -> Block:
    """Run a program forward and backward on its tape, with an input that carries a gradient if `trains`.

    The program gets its input in a list, and takes it out where its caller does not hold it through the call.
    """
    tape = builder.tape
    edge = Edge() if trains else None
    given = tape.new("input", width, extent, size, edge)
    tape.events.clear()
    inputs = [given]
    del given
    made = program(inputs)
    inputs.clear()
    cached = tuple(value.storage.number for value in tape.casts.values() if value.storage.count == 1)
    tape.casts.clear()
    output, back = made.storage.number, made.edge
    forward = _own(tape.events)
    kept = tuple(n for n, storage in enumerate(tape.storages) if storage.count and n != output and storage.number == n)
    gradient = -1
    if back is not None:
        back.buffer = tape.like(made, "output_gradient")
        gradient = back.buffer.storage.number
    del made
    tape.events.clear()
    tape.run_backward()
    backward = _own(tape.events)
    asks = len(_own(tape.events[: tape.asks])) if tape.asks >= 0 else len(backward)
    to_input = edge.buffer.storage.number if edge is not None and edge.buffer is not None else -1
    return Block(name, tuple(tape.storages), forward, backward, kept, output, gradient, to_input, cached, asks)


OUTSIDE = 2**30  # the number of a storage that belongs to the model or its caller, not to a block


def _own(events: list[int]) -> tuple[int, ...]:
    return tuple(event for event in events if event not in (OUTSIDE, ~OUTSIDE))


def recomputed(kept: Block, whole: Block) -> Block:
    """A block under activation checkpointing: it keeps its input, and runs forward again when its backward asks for what it saved.

    The hooks of what it saves hold its input until its last operator has run backward (torch/utils/checkpoint.py).
    """
    forward = (*whole.forward, *((~whole.output,) if whole.output_gradient >= 0 else ()))
    again = (*whole.backward[: whole.asks], *forward, *whole.backward[whole.asks :])
    backward = (*(event for event in again if event != ~0), ~0)
    return Block(
        whole.name, whole.storages, kept.forward, backward, (0,), whole.output, whole.output_gradient, whole.input_gradient,
        kept.cached,
    )  # fmt: skip
