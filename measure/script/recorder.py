"""The recorder of a user's program: host tensors stay what they are, those on the GPU are fake, and each of these is recorded.

Every tensor on the make-believe GPU is a fake CPU tensor whose storage is on record here; that is what makes it a GPU's. On the host
small tensors are real, so that data are read, shuffled and put together as ever; large ones are fake too, and cost nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from calc.units import KiB, MiB
from measure.script.lines import NOWHERE, Line, running_line
from measure.trace.recorder import Event, Place, Recorder

_CPU = torch.device("cpu")
_LARGEST_REAL = 64 * MiB  # of one host tensor
_SURELY_SMALL = 64 * KiB  # inputs that no operation makes large results of
ROUNDING = 512  # bytes, the CUDA caching allocator's granule (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
# operators that take host tensors next to a GPU's (indices on the host are allowed, and copies are what they are for)
_MIXED = ("copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_", "set_", "_pin_memory")


class _Events(list[Event]):
    """The list of events, which passes on each one that it gets."""

    def __init__(self, passed_on: Callable[[Event], None]) -> None:
        super().__init__()
        self._passed_on = passed_on

    def append(self, event: Event) -> None:
        super().append(event)
        self._passed_on(event)


class ScriptRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records what a program holds on a GPU whose tensors may come to `limit` bytes (None: no limit).

    `now` and `peak` are bytes; `lines` has the user's line of each event; `crossed` is the first event beyond the limit, or None.
    """

    supports_higher_order_operators = True

    def __init__(self, limit: int | None = None) -> None:
        super().__init__({}, ROUNDING, by_owner=False)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.limit = limit
        self.now = self.peak = 0
        self.peak_since_reset = 0
        self.crossed: int | None = None
        self.lines: list[Line] = []
        self.inside = 0  # above 0 while an operator runs: then devices are what PyTorch takes them for
        self.phase = "setup"
        self.begin(self.phase)
        self.events: list[Event] = _Events(self._count)
        self._forced: bool | None = None
        self._near_gpu = False
        self._on_gpu = False
        self._hosts: frozenset[int] = frozenset()
        self.names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()

    @contextlib.contextmanager
    def placing(self, on_gpu: bool | None, near_gpu: bool) -> Iterator[None]:
        """Within it, new tensors go to the GPU or the host, or, with None, where the tensors that they are made of lie."""
        kept = self._forced, self._near_gpu
        self._forced, self._near_gpu = on_gpu, near_gpu
        try:
            yield
        finally:
            self._forced, self._near_gpu = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if isinstance(
            func, HigherOrderOperator
        ):  # DTensor's random numbers: offsets of a generator, operator, its arguments
            with self:
                return args[2](*args[3:], **(kwargs or {}))
        self.inside += 1
        kept = self._on_gpu, self._hosts
        try:
            return self._run(func, types, args, kwargs or {})
        finally:
            self.inside -= 1
            self._on_gpu, self._hosts = kept

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        tensors = [each for each in flat if isinstance(each, Tensor)]
        devices = {each.type for each in flat if isinstance(each, torch.device)}
        if "cuda" in devices:
            flat = [_CPU if isinstance(each, torch.device) and each.type == "cuda" else each for each in flat]
            args, kwargs = tree_unflatten(flat, spec)
        if "meta" in devices or (
            not devices and any(type(each) is not FakeTensor and each.is_meta for each in tensors)
        ):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        gpus = [each for each in tensors if self.of(each) is not None]
        self._on_gpu = self._placed("cuda" in devices, bool(gpus), bool(tensors))
        if not self._on_gpu and not any(isinstance(each, FakeTensor) for each in tensors):
            return self._on_host(func, args, kwargs, tensors)
        if gpus:
            self._check_devices(func, tensors)
        self._hosts = frozenset(each.untyped_storage()._cdata for each in tensors if self.of(each) is None)
        return super().__torch_dispatch__(func, types, _shown(func, args), kwargs)

    def _placed(self, asked: bool, given: bool, tensors: bool) -> bool:
        """Whether what an operator makes lies on the GPU."""
        if self._forced is not None:
            return self._forced
        if asked or given:
            return True
        return not tensors and (self._near_gpu or torch._C._current_autograd_node() is not None)

    def _on_host(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run with real tensors, unless what it makes would be large."""
        given = sum(each.nbytes for each in tensors if not each.is_sparse)
        if not tensors or given > _SURELY_SMALL:
            try:
                made = func(*args, **kwargs)
            except Exception:  # its result hangs on values, or is wrong: the real run tells
                made = None
            leaves = tree_flatten(made)[0]
            if any(isinstance(each, FakeTensor) and each.untyped_storage().nbytes() > _LARGEST_REAL for each in leaves):
                return made
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _check_devices(self, func: Any, tensors: list[Tensor]) -> None:
        """The error that a GPU gives when an operator gets tensors of the host next to its own."""
        if func._schema.name.split("::")[1] in _MIXED or func._opname.startswith("_foreach") or "rng" in func._opname:
            return
        if func.namespace in ("aten", "prims") and any(self.of(each) is None and each.dim() for each in tensors):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"(when checking arguments of {func._schema.name})"
            )

    def _see(self, tensor: Tensor, func: Any, owner: Tensor | None = None) -> None:
        if self._on_gpu and not tensor.is_meta and tensor.untyped_storage()._cdata not in self._hosts:
            super()._see(tensor, func, owner)

    def _count(self, event: Event) -> None:
        """Keep the bytes of now and at most, and the line."""
        self.now += event.sign * event.storage.nbytes
        self.lines.append(running_line() if event.sign > 0 else NOWHERE)
        self.peak = max(self.peak, self.now)
        self.peak_since_reset = max(self.peak_since_reset, self.now)
        if self.crossed is None and self.limit is not None and self.now > self.limit:
            self.crossed = len(self.events) - 1

    def _enter(self, module: torch.nn.Module) -> None:
        if module not in self.names:
            for name, each in module.named_modules():
                self.names.setdefault(each, name)
        self._stack.append((None, self.names[module]))

    def place_of(self, module: torch.nn.Module) -> Place:
        """Where a module's tensors count."""
        return (None, self.names.get(module, ""))


def _shown(func: Any, args: Any) -> Any:
    """The operator's arguments, with masks in the place of indices replaced by all positions.

    How many elements a mask picks is in its values, which fake tensors have none of: all of them is the upper bound.
    """
    if func is not torch.ops.aten.index.Tensor or not any(_is_mask(each) for each in args[1]):
        return args
    indices: list[Tensor | None] = []
    for each in args[1]:
        if each is None or not _is_mask(each):
            indices.append(each)
        else:
            indices += [torch.zeros(each.numel(), dtype=torch.int64) for _ in range(each.dim())]
    return (args[0], indices, *args[2:])


def _is_mask(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in (torch.bool, torch.uint8)
