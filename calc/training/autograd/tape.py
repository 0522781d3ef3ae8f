"""Symbolic tensors that live and die as PyTorch's do, so that a layer written once tells what it saves and where it peaks.

A program written with a `Tape` runs forward and then backward without numbers: every tensor has a size in letters, a number
format and an owner. What an operator saves for backward follows PyTorch's derivatives (tools/autograd/derivatives.yaml), what it
computes in follows its type promotion and CUDA's autocast lists, and what is alive follows Python's own reference counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from calc.model.weights import Dim


class Extent(NamedTuple):
    """How a size grows: with b^batch · s^sequence, divided by `shards` where sequence parallelism splits the sequence.

    `more` columns follow the last s.
    """

    batch: int = 1
    sequence: int = 1
    shards: int = 1
    more: int = 0

    def elements(self, batch: int, tokens: int) -> int:
        """Elements for each of the dimension's, on all shards together."""
        whole: int = batch**self.batch * tokens**self.sequence
        return whole + self.more * (whole // tokens)


TOKENS = Extent()
POSITIONS = Extent(0, 1)  # one table for all sequences
PAIRS = Extent(1, 2)  # attention scores
FIXED = Extent(0, 0)


@dataclass(slots=True, eq=False)
class Storage:
    """Memory of `dim` elements times its extent, in `bytes` each. `count` are the handles alive."""

    name: tuple[str, ...]
    dim: Dim
    extent: Extent
    bytes: int
    number: int
    count: int = 0
    weight: bool = False  # the gradient of a weight


@dataclass(slots=True, eq=False)
class Edge:
    """Where a gradient flows: the buffer that its producer will take it from."""

    buffer: Value | None = None


class Value:
    """A handle on a storage. The storage is freed when its last handle goes, as PyTorch frees a tensor's."""

    __slots__ = ("bytes", "dim", "edge", "extent", "storage", "tape")

    def __init__(self, tape: Tape, storage: Storage, dim: Dim, edge: Edge | None) -> None:
        self.tape, self.storage, self.dim, self.edge = tape, storage, dim, edge
        self.extent, self.bytes = storage.extent, storage.bytes
        storage.count += 1

    def __del__(self) -> None:
        self.storage.count -= 1
        if not self.storage.count:
            self.tape.events.append(~self.storage.number)

    @property
    def grad(self) -> bool:
        return self.edge is not None


Backward = Callable[["Value"], Sequence["Value | None"]]


@dataclass(slots=True, eq=False)
class Node:
    """One operator of the graph: what it saved, and how it makes its inputs' gradients from its output's.

    `asks`: it saved something, be it a weight, for which a checkpoint runs forward again.
    """

    inputs: tuple[Edge | None, ...]
    outputs: tuple[Edge, ...]
    saved: list[Value]
    backward: Callable[..., Sequence[Value | None]]
    asks: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter as the tape needs it: elements on this device and whether it trains."""

    name: str
    dim: Dim
    trains: bool
    bytes: int


@dataclass(eq=False)
class Tape:
    """Records one program. `bytes` is the model's number format; `autocast` casts matmuls to 16 bits from fp32 weights."""

    bytes: int
    autocast: bool = False
    saving: bool = True  # False: the first run of a checkpointed block, which keeps nothing
    transposed: bool = False  # weights are read through a view, whose 16-bit copy autocast does not cache
    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)  # n: storage n allocated; ~n: freed
    nodes: list[Node] = field(default_factory=list)
    casts: dict[Weight, Value] = field(default_factory=dict)  # autocast's cache of 16-bit weights
    gradients: list[Value] = field(default_factory=list)  # of weights, made in backward and kept
    cached: list[Value] | None = None  # outputs that selective checkpointing keeps; None: it is not in use
    stop: int = 0  # the output of the last operator that saved anything: what comes after is not computed again
    asks: int = -1  # the events of backward until an operator first asks for what it saved
    path: tuple[str, ...] = ()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Names made inside lie under `name`."""
        before = self.path
        self.path = (*before, name)
        try:
            yield
        finally:
            self.path = before

    def new(
        self, name: str, dim: Dim, extent: Extent = TOKENS, size: int | None = None, edge: Edge | None = None
    ) -> Value:
        """A fresh tensor of `size` bytes an element."""
        storage = Storage((*self.path, name), dim, extent, size or self.bytes, len(self.storages))
        self.storages.append(storage)
        self.events.append(storage.number)
        return Value(self, storage, dim, edge)

    def like(self, other: Value, name: str = "gradient", size: int | None = None) -> Value:
        return self.new(name, other.dim, other.extent, size or other.bytes)

    def view(self, other: Value, dim: Dim | None = None) -> Value:
        """The same memory, or a part of it, with the same gradient."""
        return Value(self, other.storage, dim or other.dim, other.edge)

    def weight_copy(self, weight: Weight) -> Value:
        """Autocast's 16-bit copy of a weight, made at its first use, and again at each of a frozen one, which is not cached."""
        if weight not in self.casts:
            made = self.new(f"{weight.name}_copy", weight.dim, FIXED, 2)
            if not weight.trains:
                return made

            def backward(g: Value) -> tuple[None]:
                self.keep_gradient(self.new(f"{weight.name}_gradient", weight.dim, FIXED, weight.bytes))
                return (None,)

            self.record([Edge()], made, [], backward)
            if self.transposed:
                return made
            self.casts[weight] = made
        return self.casts[weight]

    def cache(self, *outputs: Value) -> None:
        """Outputs of an operator that selective checkpointing keeps, so that the backward need not compute them again."""
        if self.cached is not None:
            self.cached += (Value(self, value.storage, value.dim, None) for value in outputs)

    def keep_gradient(self, value: Value) -> None:
        """A weight's gradient, which stays until the optimizer's step."""
        value.storage.weight = True
        self.gradients.append(value)

    def record(
        self,
        inputs: Sequence[Value | Edge | None],
        out: Value | Sequence[Value],
        saved: Sequence[Value],
        backward: Callable[..., Sequence[Value | None]],
        saves_weight: bool = False,
    ) -> None:
        """Join an operator to the graph, if any of its inputs needs a gradient. `saves_weight`: besides `saved`."""
        edges = tuple(given.edge if isinstance(given, Value) else given for given in inputs)
        if not any(edge is not None for edge in edges):
            return
        outs = (out,) if isinstance(out, Value) else tuple(out)
        for made in outs:
            made.edge = Edge()
        kept = [self.view(value) for value in saved] if self.saving else []
        self.stop = outs[0].storage.number if kept else self.stop
        self.nodes.append(Node(edges, tuple(made.edge for made in outs), kept, backward, bool(kept) or saves_weight))  # type: ignore[misc]

    def run_backward(self) -> None:
        """Every node in reverse, as PyTorch's engine runs them: gradients first, then what the node saved is freed."""
        while self.nodes:
            self._run(self.nodes.pop())

    def _run(self, node: Node) -> None:
        given = [edge.buffer for edge in node.outputs]
        for out in node.outputs:
            out.buffer = None
        if node.asks and self.asks < 0:
            self.asks = len(self.events)
        made = node.backward(*given, *node.saved) if any(given) else ()
        given.clear()
        node.saved.clear()
        for edge, value in zip(node.inputs, made, strict=False):
            if edge is not None and value is not None:
                accumulate(edge, value)


def accumulate(edge: Edge, value: Value) -> None:
    """Add a gradient to those that came before: into the first, unless another still reads it."""
    if edge.buffer is None:
        edge.buffer = value
    elif edge.buffer.storage.count > 1:
        edge.buffer = value.tape.like(value)
