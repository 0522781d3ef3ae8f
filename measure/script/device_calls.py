"""What a program says about devices: `.cuda()`, `.to("cuda")`, `x.device`, and what it reads back to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from measure.script.recorder import ScriptRecorder

_CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class WrongGpu(RuntimeError):
    """A GPU that the program has not got."""


def device_of(value: Any) -> torch.device | None:
    """The device that an argument names, or None. A number is a GPU's."""
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        return torch.device(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cuda", value)
    return None


def getter(name: str) -> Any:
    """What a function mode is given when that attribute of a tensor is read."""
    return vars(torch._C.TensorBase)[name].__get__


class DeviceCalls(TorchFunctionMode):
    """Turns calls that name a device into calls on fake or real CPU tensors, and tells the recorder where results lie."""

    def __init__(self, recorder: ScriptRecorder, gpus: int) -> None:
        super().__init__()
        self.recorder, self.gpus = recorder, gpus
        self._own: Mapping[Any, Callable[..., Any]] = {
            Tensor.to: self._to,
            Tensor.cuda: lambda tensor, device=None, non_blocking=False, memory_format=torch.preserve_format: self._to(
                tensor, GPU if device is None else device, memory_format=memory_format
            ),
            Tensor.cpu: lambda tensor, memory_format=torch.preserve_format: self._to(tensor, _CPU),
            Tensor.pin_memory: lambda tensor, device=None: tensor,
            Tensor.is_pinned: lambda tensor, device=None: False,
            getter("is_cuda"): self._is_on_gpu,
            getter("device"): self._device,
            Tensor.get_device: lambda tensor: 0 if self._is_on_gpu(tensor) else -1,
            Tensor.tolist: self._tolist,
            Tensor.numpy: lambda tensor, *, force=False: self._numpy(tensor),
            Tensor.__array__: lambda tensor, dtype=None, copy=None: self._numpy(tensor),
            Tensor.__format__: self._format,
            Tensor.data_ptr: self._data_ptr,
            Tensor.__deepcopy__: self._deepcopy,
            torch._C._nn._parse_to: self._parsed,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._own:
            return self._own[func](*args, **kwargs)
        asked = device_of(kwargs.get("device"))
        if asked is None or asked.type == "meta":
            with self.recorder.placing(None, self._near(args)):
                return func(*args, **kwargs)
        with self.recorder.placing(self._checked(asked).type == "cuda", False):
            return func(*args, **{**kwargs, "device": _CPU})

    def _near(self, args: Any) -> bool:
        """Whether a tensor among the arguments, or in a list among them, lies on the GPU."""
        for each in args:
            if isinstance(each, Tensor):
                if self._is_on_gpu(each):
                    return True
            elif isinstance(each, (list, tuple)) and self._near(each):
                return True
        return False

    def _checked(self, device: torch.device) -> torch.device:
        if device.type == "cuda" and (device.index or 0) >= self.gpus:
            raise WrongGpu(f"GPU {device.index} is asked for, of {self.gpus}; --ranks N gives the program N of them")
        return device

    def _is_on_gpu(self, tensor: Tensor, kind: Any = None) -> bool:
        return not tensor.is_sparse and self.recorder.of(tensor) is not None

    def _device(self, tensor: Tensor, kind: Any = None) -> torch.device:
        if not self.recorder.inside and self._is_on_gpu(tensor):
            return GPU
        return tensor.device

    def _to(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """`tensor.to(...)`: to another device it is a copy, on the same one what it always is."""
        rest, device = [], device_of(kwargs.pop("device", None))
        for each in args:
            if isinstance(each, Tensor):  # to that tensor's device and dtype
                device = GPU if self._is_on_gpu(each) else each.device
                rest.append(each.dtype)
            elif device is None and not rest and (found := device_of(each)) is not None:
                device = found
            else:
                rest.append(each)
        if rest and isinstance(rest[0], bool):  # non_blocking, when no dtype was given
            rest = [tensor.dtype, *rest]
        if rest and rest[0] is None:
            rest[0] = tensor.dtype
        if not rest and "dtype" not in kwargs:
            rest = [tensor.dtype]
        if device is not None and device.type == "meta":
            return tensor.to(device, *rest, **kwargs)
        here = self._is_on_gpu(tensor)
        there = here if device is None else self._checked(device).type == "cuda"
        if tensor.is_meta and not isinstance(tensor, FakeTensor):
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        if here == there:
            return tensor.to(*rest, **kwargs)
        with self.recorder.placing(there, False):
            return tensor.to(*rest, **{**kwargs, "copy": True} if len(rest) < 3 else kwargs)

    def _values(self, tensor: Tensor) -> Any:
        """A real array in the place of a fake tensor's values: the number that `.item()` answers, everywhere."""
        kind = torch.empty(0, dtype=tensor.dtype).numpy().dtype if tensor.dtype is not torch.bfloat16 else np.float32
        return np.full(tuple(tensor.shape), self.recorder._scalar(tensor), dtype=kind)

    def _numpy(self, tensor: Tensor) -> Any:
        if self._is_on_gpu(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return self._values(tensor) if isinstance(tensor, FakeTensor) else tensor.numpy()

    def _tolist(self, tensor: Tensor) -> Any:
        return self._values(tensor).tolist() if isinstance(tensor, FakeTensor) else tensor.tolist()

    def _parsed(self, *args: Any, **kwargs: Any) -> Any:
        """`module.to(...)`'s arguments, where a number is a GPU."""
        numbers = [device_of(each) if isinstance(each, int) and not isinstance(each, bool) else each for each in args]
        kwargs = {name: device_of(each) if name == "device" else each for name, each in kwargs.items()}
        parse: Any = torch._C._nn._parse_to
        return parse(*numbers, **kwargs)

    def _format(self, tensor: Tensor, spec: str) -> str:
        return format(tensor.item() if tensor.dim() == 0 else repr(tensor), spec)

    def _deepcopy(self, tensor: Any, memo: dict[int, Any]) -> Any:
        """A copy of a fake tensor without a copy of all that it knows, the fake tensors' mode among it."""
        if not isinstance(tensor, FakeTensor):
            return tensor.__deepcopy__(memo)
        if id(tensor) not in memo:
            with self.recorder.placing(self._is_on_gpu(tensor), False):
                made: Tensor = tensor.detach().clone()
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, tensor.requires_grad)
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    def _data_ptr(self, tensor: Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return tensor.data_ptr()
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


@contextlib.contextmanager
def fake_tensors_on_gpu(recorder: ScriptRecorder) -> Iterator[None]:
    """Within it `x.device` of a recorded fake tensor is the GPU, and every parameter is fake, wherever it lies."""
    device: Any = FakeTensor.device
    parameter_class: Any = torch.nn.Parameter
    new = parameter_class.__new__
    apply: Any = torch.nn.Module._apply

    def shown(self: FakeTensor) -> Any:
        if recorder.inside or self.fake_mode.in_kernel_invocation or recorder.of(self) is None:
            return device.fget(self)
        return GPU

    def made(kind: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if data is None:
            data = torch.empty(0)
        if isinstance(data, Tensor) and type(data) in (Tensor, torch.nn.Parameter) and not data.is_meta:
            data = recorder.fake.from_tensor(data.detach())
        return new(kind, data, requires_grad)

    def applied(self: Any, change: Any, recurse: bool = True) -> Any:
        own = [each for each in self._parameters.values() if each is not None]
        if not all(isinstance(each, FakeTensor) for each in own):
            return apply(self, change, recurse)
        for child in self.children() if recurse else ():
            child._apply(change)
        for parameter in own:
            with torch.no_grad():
                parameter.data = change(parameter)
                if parameter.grad is not None:
                    parameter.grad.data = change(parameter.grad)
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else change(buffer)
        return self

    torch.nn.Module._apply = applied  # type: ignore[method-assign]
    FakeTensor.device = property(shown)  # type: ignore[assignment]
    parameter_class.__new__ = made
    try:
        yield
    finally:
        FakeTensor.device = device  # type: ignore[method-assign]
        parameter_class.__new__ = new
        torch.nn.Module._apply = apply  # type: ignore[method-assign]
