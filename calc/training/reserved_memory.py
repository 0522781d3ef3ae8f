"""What PyTorch's allocator comes to reserve in a training step: the step's allocations, played through a model of the allocator.

The states lie there first. Two steps run, for the first finds no optimizer states, which then lie in holes that it left. Storages of
at most 1 MiB live in a pool of their own, whose 2 MiB segments they fill: they are counted, not played. Of a long run of equal
layers that are recomputed, the inner ones are played by what they keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from calc.training.autograd.blocks import Block, Sizes, storage_bytes
from calc.training.caching_allocator import SMALL, SMALL_SEGMENT, CachingAllocator
from calc.training.caching_allocator import Block as Held
from calc.training.deepspeed.engine import FP32, WIDTH
from calc.training.deepspeed.stage import engine_of
from calc.training.states.fsdp_buffers import FsdpBuffers, Group
from calc.training.states.recipes import OPTIMIZERS
from calc.training.states.sharding import Placed, StateKey
from calc.training.states.tensors import Tensors
from calc.units import round_up

if TYPE_CHECKING:
    from calc.training.stage_memory import StageMemory

STEPS = 2
COMPUTES, GATHERS, REDUCES = range(3)  # streams
_EDGE = 2  # layers at each end of a run that are played


class Program(NamedTuple):
    """A block's large storages: what forward and backward allocate (number, bytes) and free (number, 0), in order."""

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...]
    weights: tuple[tuple[int, int], ...]
    output: tuple[int, int]
    output_gradient: tuple[int, int]
    input_gradient: int


@lru_cache(maxsize=8192)
def program_of(block: Block, sizes: Sizes) -> Program:
    """The block's events with numbers. Cached: a block hashes by identity."""
    size = [storage_bytes(storage, sizes) for storage in block.storages]

    def large(events: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        pairs = ((event, size[event]) if event >= 0 else (~event, 0) for event in events)
        return tuple((number, found) for number, found in pairs if size[number] > SMALL)

    gradient, weights = block.output_gradient, [n for n, storage in enumerate(block.storages) if storage.weight]
    return Program(
        large(
            tuple(event for event in block.forward if ~event not in block.kept)
        ),  # what is kept outlives its last reader
        large(block.backward),
        large(block.kept),
        large(tuple(weights)),
        (block.output, size[block.output]),
        (gradient, size[gradient] if gradient >= 0 else 0),
        block.input_gradient,
    )


class Replay:
    """One device's allocations: its states, and then the steps."""

    def __init__(self, memory: StageMemory, allocator: CachingAllocator) -> None:
        self.memory, self.allocator = memory, allocator
        self.programs = [program_of(*segment.program) for segment in memory.segments if segment.program]
        self.gradients: dict[tuple[int, int], Held] = {}
        self.fsdp = _Fsdp(self, memory.full_weights) if isinstance(memory.full_weights, FsdpBuffers) else None
        self.averaged: Held | None = None  # DeepSpeed's gradients of the micro-batches so far
        self.engine = memory.plan.implementation == "deepspeed"
        self.sharded = memory.plan.shards if memory.plan.zero >= 2 else 1  # ranks that share the gradients

    def large(self, size: int, stream: int = COMPUTES) -> Held | None:
        return self.allocator.malloc(size, stream) if size > SMALL else None

    def drop(self, *held: Held | None) -> None:
        for block in held:
            if block is not None:
                self.allocator.free(block)

    def run(self) -> None:
        memory, (parameters, gradients, optimizer) = self.memory, self.memory.states
        for size in [parameters] if self.engine else self.storages("parameters", parameters):
            self.large(size)
        self.large(memory.ddp_buckets)
        self.large(gradients if self.engine and memory.plan.zero == 3 else 0)  # a buffer for all, made once
        states: list[Held | None] = []
        for _ in range(STEPS):
            for _ in range(min(memory.plan.microbatches, 2)):
                self.micro_batch()
            made = [optimizer // 3] * 3 if self.engine else list(self.storages("optimizer", optimizer))
            states = states or [self.large(size) for size in made]
            if self.engine:
                self.engine_step()
            else:
                self.step()
            self.drop(*self.gradients.values())
            self.gradients.clear()
            if self.fsdp:
                self.fsdp.clear()

    def storages(self, group: str, there: int) -> Iterator[int]:
        return storages(self.memory.groups, self.memory.key, group) if there else iter(())

    def step(self) -> None:
        """What the optimizer's kernel makes of all weights at once, or the most of what it makes one at a time."""
        memory, found = self.memory, self.memory.step
        ledger = OPTIMIZERS[memory.plan.optimizer]
        last = (ledger.moments or ("",))[-1]
        made: list[int] = [int(c.leaf.total) for c in memory.constants if c.until == "end"]
        if found.foreach and found.foreach == max(found):
            made += [*storages(memory.groups, memory.key, "optimizer", last)] * ledger.foreach
        elif max(found):
            made.append(max(found))
        self.drop(*[self.large(size) for size in made])

    def engine_step(self) -> None:
        """DeepSpeed's: the gradients flattened, cast to fp32 and let go, and the kernel's temporaries; stage 3 has a buffer of its
        own for the gradients, and takes a sub-group at a time."""
        engine = engine_of(self.memory.plan, self.memory.groups, self.memory.key)
        if engine.host:
            return
        whole = engine.settings.stage == 3
        size = engine.sub_group if whole else engine.shard
        averaged, self.averaged = self.averaged, None
        flat, wide = self.large(WIDTH * size), self.large(FP32 * size)
        self.drop(averaged, flat)
        self.drop(*[self.large(FP32 * size) for _ in range(engine.copies)], wide)

    def micro_batch(self) -> None:
        """Forward through all segments and back."""
        constants = [self.large(int(c.leaf.total)) for c in self.memory.constants if c.until not in ("end", "backward")]
        saved: list[dict[int, Held]] = []
        passed: Held | None = None
        inner = self._inner()
        for index, program in enumerate(self.programs):
            passed = self._forward(index, program, passed, saved, index in inner)
        constants += [self.large(int(c.leaf.total)) for c in self.memory.constants if c.until == "backward"]
        part: Held | None = None
        gradient: Held | None = None
        for index in reversed(range(len(self.programs))):
            gradient = self._backward(index, saved.pop(), gradient, index in inner)
            part = part or self.large(self.memory.shape.partition)  # with the first bucket
        if self.fsdp:
            self.fsdp.end()
        if self.averaged is None:
            self.averaged, part = part, None
        self.drop(gradient, passed, part, *constants)

    def _inner(self) -> set[int]:
        """The segments between like ones that keep their input alone."""
        found, programs = set(), self.programs
        for index in range(_EDGE, len(programs) - _EDGE):
            near = programs[index - _EDGE : index + _EDGE + 1]
            if all(program is programs[index] for program in near) and len(programs[index].kept) < 2:
                found.add(index)
        return found if not (self.fsdp and self.fsdp.active) else set()

    def _forward(
        self, index: int, program: Program, passed: Held | None, saved: list[dict[int, Held]], inner: bool
    ) -> Held | None:
        held: dict[int, Held] = {} if passed is None else {0: passed}
        if inner:
            saved.append(held)
            self._send_away(index, held)
            return self.large(program.output[1])
        if self.fsdp:
            self.fsdp.before_forward(index)
        self.play(program.forward, held)
        if self.fsdp:
            self.fsdp.after_forward(index)
        output = held.pop(program.output[0], None)
        saved.append({number: held.pop(number) for number, _ in program.kept if number in held})
        self.drop(*held.values())
        self._send_away(index, saved[-1])
        return output

    def _send_away(self, index: int, kept: dict[int, Held]) -> None:
        """To host memory, what a layer keeps."""
        if self.memory.plan.offload_activations and self.memory.segments[index].inside:
            self.drop(*kept.values())
            kept.clear()

    def _backward(self, index: int, held: dict[int, Held], gradient: Held | None, inner: bool) -> Held | None:
        program = self.programs[index]
        if inner:
            self._keep(index, {number: self.allocator.malloc(size) for number, size in program.weights})
            self.drop(*held.values())
            return gradient
        if self.fsdp:
            self.fsdp.before_backward(index)
        if self.memory.plan.offload_activations and self.memory.segments[index].inside:  # and back
            held = {number: self.allocator.malloc(size) for number, size in program.kept}
        number, size = program.output_gradient
        first = gradient if gradient is not None else self.large(size) if number >= 0 else None
        if first is not None:
            held[number] = first
        self.play(program.backward, held)
        self._keep(index, {number: held.pop(number) for number, _ in program.weights if number in held})
        back = held.pop(program.input_gradient, None)
        self.drop(*held.values())
        return back

    def _keep(self, index: int, made: dict[int, Held]) -> None:
        """Gradients of weights: added to those that are there, copied into the engine's buckets, or reduced to shards."""
        if self.fsdp and self.fsdp.active:
            self.fsdp.reduce(index, [*made.values()])
        elif self.engine or self.memory.shape.streams or self.memory.plan.optimizer_in_backward:
            self.drop(*made.values())
        elif self.sharded > 1:
            for number, block in made.items():
                if (index, number) not in self.gradients and block.size > self.sharded * SMALL:
                    self.gradients[index, number] = self.allocator.malloc(block.size // self.sharded)
            self.drop(*made.values())
        else:
            for number, block in made.items():
                if self.gradients.setdefault((index, number), block) is not block:
                    self.allocator.free(block)

    def play(self, events: Sequence[tuple[int, int]], held: dict[int, Held]) -> None:
        malloc, free = self.allocator.malloc, self.allocator.free
        for number, size in events:
            if size:
                held[number] = malloc(size)
            elif number in held:
                free(held.pop(number))


class _Fsdp:
    """The buffers of FSDP2's gathers and reduce-scatters, in the order in which it makes them."""

    def __init__(self, replay: Replay, buffers: FsdpBuffers) -> None:
        self.replay, self.buffers, self.active = replay, buffers, buffers.active
        one = replay.memory.plan.simple_fsdp  # operators of one graph, in its stream
        self.gathers, self.reduces = (COMPUTES, COMPUTES) if one else (GATHERS, REDUCES)
        self.whole: dict[int, list[Held | None]] = {}
        self.flat: dict[int, Held | None] = {}
        self.reducing: Held | None = None
        self.waiting: list[Held] = []
        self.shards: dict[int, Held | None] = {}

    def _group(self, index: int) -> tuple[int, Group] | None:
        """The segment's group: a layer's, or -1 and the root's."""
        layer = index - self.buffers.first
        if 0 <= layer < len(self.buffers.layers):
            return layer, self.buffers.layers[layer]
        return None if self.buffers.apart else (-1, self.buffers.root)

    def _gather(self, layer: int, group: Group) -> None:
        if layer not in self.flat and layer not in self.whole:
            self.flat[layer] = self.replay.large(group.flat.bytes, self.gathers)
            self.replay.drop(self.replay.large(group.cast.bytes, self.gathers))

    def _copy_out(self, layer: int, group: Group) -> None:
        if layer not in self.whole:
            self.whole[layer] = [self.replay.large(size) for size in group.storages]

    def before_forward(self, index: int) -> None:
        found = self._group(index) if self.active else None
        if found is None:
            return
        before = [layer for layer in self.flat if layer != found[0]]
        self._gather(*found)
        self._copy_out(*found)
        self.replay.drop(*[self.flat.pop(layer) for layer in before])

    def after_forward(self, index: int) -> None:
        found = self._group(index) if self.active else None
        last = self.buffers.apart and found is not None and found[0] == len(self.buffers.layers) - 1
        if found is not None and found[0] >= 0 and not self.buffers.keeps and not last:
            self.replay.drop(*self.whole.pop(found[0], ()))
        if last:  # the model's forward has ended, and the loss lies behind it
            self.replay.drop(*self.flat.values())
            self.flat.clear()

    def before_backward(self, index: int) -> None:
        found = self._group(index) if self.active else None
        if found is None:
            return
        self._gather(*found)
        self._copy_out(*found)
        self.replay.drop(self.flat.pop(found[0], None))
        following = self._group(index - 1) if index else None
        if following is not None and following[0] >= 0:
            self._gather(*following)

    def reduce(self, index: int, gradients: list[Held]) -> None:
        found = self._group(index)
        if found is None or found[0] < 0:
            self.waiting += gradients
            return
        layer, group = found
        self.replay.drop(*self.whole.pop(layer, ()))
        self._scatter(layer, group, gradients)

    def _scatter(self, layer: int, group: Group, gradients: list[Held]) -> None:
        self.replay.drop(self.reducing)
        self.reducing = self.replay.large(group.reduced.bytes)
        self.replay.drop(*gradients)
        shard = self.replay.large(group.reduced.bytes // max(self.replay.memory.plan.shards, 1), self.reduces)
        if layer in self.shards:
            self.replay.drop(shard)
        else:
            self.shards[layer] = shard

    def end(self) -> None:
        """The root's turn, when all else has ended."""
        if not self.active:
            return
        if self.waiting:
            self._scatter(-1, self.buffers.root, self.waiting)
            self.waiting = []
        self.replay.drop(self.reducing, *self.flat.values(), *chain.from_iterable(self.whole.values()))
        self.reducing = None
        self.flat.clear()
        self.whole.clear()

    def clear(self) -> None:
        """Gradients set to None."""
        self.replay.drop(*self.shards.values())
        self.shards.clear()


def storages(groups: tuple[Placed, ...], key: StateKey, group: str, name: str = "") -> Iterator[int]:
    """Bytes of each storage of a group of states, or of one state by its name, in the order of the model."""
    for tensors, count in groups:
        yield from _storages(tensors, key, group, name) * count


@lru_cache(maxsize=4096)
def _storages(tensors: Tensors, key: StateKey, group: str, name: str) -> tuple[int, ...]:
    stored: dict[tuple[str, str], int] = {}
    for tensor in tensors.tensors:
        for rule in key.rules(tensor):
            if rule.group == group and name in ("", rule.name):
                place = rule.name, key.storage(tensor)
                stored[place] = stored.get(place, 0) + key.bytes(tensor, rule)
    return tuple(stored.values())


def replayed(memory: StageMemory, allocator: CachingAllocator | None = None) -> int:
    """Bytes that the allocator holds of the device after the steps, workspaces of matmuls not among them."""
    allocator = allocator or CachingAllocator()
    Replay(memory, allocator).run()
    peak = memory.peak[1].bytes
    small = round_up(max(peak - allocator.peak_allocated, 0), SMALL_SEGMENT)
    found = allocator.peak_reserved + small
    if allocator.limit is None or allocator.peak_reserved > allocator.limit:
        return found
    return min(found, max(allocator.limit, peak))  # small segments make what is cached go back as well
