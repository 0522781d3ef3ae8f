"""The recorder: sees every operation of a step and keeps one record for each storage, from its allocation to its end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from measure.trace.cuda import grouped_mm, layer_norm
from measure.trace.quantised import dequantised_linear

_MAIN_SEQUENCES = 2**62  # AccumulateGrad's sequence number lies above; real ones below
_QUERIES = {
    torch.ops.prim.device.default,
    torch.ops.aten.detach.default,
}  # make no storage, and are no operation of the model
_AS_CUDA = {  # operators whose version for fake CPU tensors takes or keeps other formats
    torch.ops.aten._grouped_mm.default: grouped_mm,
    torch.ops.aten.native_layer_norm.default: layer_norm,
}
_NF4_MATMUL = "bitsandbytes::gemm_4bit"  # which CUDA composes of others, each seen by itself
_SCALAR_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}
_BUFFERS = {"all_gather_copy_in": "all_gather", "chunk_cat": "reduce_scatter"}  # what FSDP2's operators fill

Place = tuple[int | None, str]  # decoder layer (None outside the stack), module path (inside the layer)
_OUTSIDE: Place = (None, "")


class Site(NamedTuple):
    """Where the program was: phase of the step, decoder layer (None outside the stack) and module path."""

    phase: str
    layer: int | None
    module: str


@dataclass(eq=False, slots=True)
class Node:
    """One operation of the forward pass, as autograd numbers them."""

    site: Site
    op: str = ""


@dataclass(eq=False, slots=True)
class Storage:
    """One storage: its bytes (rounded as the allocator does, and exact), what made it, and the first operation that saved it."""

    nbytes: int
    exact: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    site: Site
    category: str = ""
    saved_by: Node | None = None
    again: bool = False  # backward computed it a second time


class Event(NamedTuple):
    """One allocation (+1) or release (-1), in the order of the program."""

    storage: Storage
    sign: int
    site: Site


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records storages made under it. Enter it above a FakeTensorMode; `phase` names the part of the step that runs.

    `places` gives a module's (decoder layer or None, path) by its id. Sizes round up to `rounding` bytes. With `by_owner` what
    an optimizer makes belongs to the layer of the tensor that it is made for: its kernels over lists hold those of all layers at
    once. Reading a scalar back (`.item()`), which fake tensors refuse, answers a plausible number.
    """

    def __init__(self, places: Mapping[int, Place], rounding: int, by_owner: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_owner = by_owner
        self.events: list[Event] = []
        self.phase = "setup"
        self.places, self._rounding = places, rounding
        self._live: dict[int, tuple[Storage, Any]] = {}
        self._emptied: dict[int, tuple[Storage, Any]] = {}
        self._nodes: dict[int, Node] = {}
        self._stack: list[Place] = []
        self._site = Site("setup", None, "")

    def live(self) -> list[Storage]:
        """The storages alive now."""
        return [storage for storage, _ in self._live.values()]

    def of(self, tensor: Tensor) -> Storage | None:
        """The record of a tensor's storage, if it was made under this recorder and is alive."""
        key = _local(tensor).untyped_storage()._cdata
        found = self._live.get(key) or self._emptied.get(key)
        return found[0] if found else None

    def mark(self, tensor: Tensor, category: str, place: Place = _OUTSIDE, name: str = "") -> None:
        """Set what a tensor's storage is: its category, and the place and name that it counts under."""
        storage = self.of(tensor)
        if storage is not None:
            storage.category, storage.saved_by = category, None
            storage.site, storage.op = Site("setup", *place), name

    def begin(self, phase: str) -> None:
        """Enter a phase of the step."""
        self.phase = phase
        self._site = Site(phase, None, "")

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Within it, module calls are followed, so that sites know the module."""
        hooks = torch.nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(lambda module, args: self._enter(module)),
            hooks.register_module_forward_hook(lambda module, args, output: self._leave(module), always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def saves(self) -> Iterator[None]:
        """Within it, every tensor that autograd saves is noted with the operation that saves it."""
        with torch.autograd.graph.saved_tensors_hooks(self._note_saved, lambda tensor: tensor):
            yield

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Within it, a storage that is resized to nothing counts as released, and as allocated when it has its size again."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            made = resize(storage, size)
            self._resized(storage)
            return made

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its local tensors comes here
        if func in _SCALAR_READS:
            return self._scalar(args[0])
        if func in _QUERIES or func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        self._site = self._where(func._opname)
        if func.name() == _NF4_MATMUL:
            with self:
                return dequantised_linear(*args, **(kwargs or {}))
        run = _AS_CUDA.get(func, func)
        result = run(*args, **(kwargs or {}))
        owners = args[0] if self.by_owner and self.phase == "step" and args else ()
        if isinstance(result, Tensor):
            self._see(result, func, owners if isinstance(owners, Tensor) and result.dim() else None)
        elif isinstance(result, (tuple, list)):
            for index, item in enumerate(result):
                if isinstance(item, Tensor):
                    self._see(item, func, owners[index] if isinstance(owners, list) else None)
        if func.namespace == "fsdp" and func._opname in _BUFFERS:
            self._buffer(_BUFFERS[func._opname], args[1] if func._opname == "all_gather_copy_in" else kwargs["out"])
        return result

    def _buffer(self, name: str, tensor: Tensor) -> None:
        storage = self.of(tensor)
        if storage is not None and not storage.category:
            storage.category, storage.op = "gathered", name

    def _enter(self, module: torch.nn.Module) -> None:
        self._stack.append(self.places.get(id(module), self._stack[-1] if self._stack else _OUTSIDE))

    def _leave(self, module: torch.nn.Module) -> None:
        if self._stack:
            self._stack.pop()

    def _here(self) -> Site:
        return Site(self.phase, *(self._stack[-1] if self._stack else _OUTSIDE))

    def _where(self, op: str = "") -> Site:
        """The site of the running operation; in backward, that of the forward operation whose gradient it computes."""
        node = torch._C._current_autograd_node()
        if self._stack or node is None:
            site = self._here()
            sequence = torch._C._autograd._get_sequence_nr() - 1
            known = self._nodes.setdefault(sequence, Node(site))
            known.op = known.op or op
            return site
        sequence = node._sequence_nr()
        if sequence >= _MAIN_SEQUENCES or sequence not in self._nodes:
            return self._site._replace(phase=self.phase)
        return self._nodes[sequence].site._replace(phase=self.phase)

    def _see(self, tensor: Tensor, func: Any, owner: Tensor | None = None) -> None:
        """Record a new storage, in the layer of its owner if it has one."""
        untyped = tensor.untyped_storage()
        key = untyped._cdata
        if key in self._live:
            return
        exact = untyped.nbytes()
        nbytes = -(-exact // self._rounding) * self._rounding
        owned = self.of(owner) if owner is not None else None
        site = owned.site._replace(phase=self.phase) if owned else self._site
        storage = Storage(nbytes, exact, tuple(tensor.shape), tensor.dtype, func._schema.name.split("::")[1], site)
        storage.again = bool(self._stack) and self.phase.startswith("backward")
        self._live[key] = (storage, weakref.ref(untyped, lambda _: self._end(key, storage)))
        self.events.append(Event(storage, 1, self._site))

    def _end(self, key: int, storage: Storage) -> None:
        self._emptied.pop(key, None)
        if self._live.pop(key, None):
            self.events.append(Event(storage, -1, self._site))

    def _resized(self, untyped: torch.UntypedStorage) -> None:
        key, held = untyped._cdata, untyped.nbytes() > 0
        before, after = (self._emptied, self._live) if held else (self._live, self._emptied)
        if key in before:
            after[key] = before.pop(key)
            if torch._C._current_autograd_node() is not None:
                self._site = self._where()
            self.events.append(Event(after[key][0], 1 if held else -1, self._site))

    def _note_saved(self, tensor: Tensor) -> Tensor:
        storage = self.of(tensor)
        if storage is not None and storage.saved_by is None:
            sequence = torch._C._autograd._get_sequence_nr() - 1
            storage.saved_by = self._nodes.setdefault(sequence, Node(self._here()))
        # a node that held its own output by a hook would outlive a graph that is dropped before its backward
        return tensor if tensor.grad_fn is None else tensor.detach()

    def _scalar(self, tensor: Tensor) -> bool | int | float:
        """The value read back from a fake tensor: 2 for a step counter, no for a condition, else a number within reason."""
        if tensor.dtype is torch.bool:
            return False
        storage = self.of(tensor)
        if storage is not None and storage.op.endswith("/step"):
            return 2.0
        return 0.5 if tensor.is_floating_point() else 1
