"""A stretch of a program's run on the make-believe GPU: phases by hooks, the end after N optimizer steps, what is refused."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from calc.hardware import Gpu
from measure.script.device_calls import DeviceCalls, fake_tensors_on_gpu
from measure.script.distributed import one_of_many_ranks
from measure.script.lines import Line, running_line
from measure.script.make_believe_gpu import Patches, answer_cuda, autocast_for_cuda, import_without_gpu
from measure.script.pretrained import weights_from_config
from measure.script.recorder import ScriptRecorder
from measure.trace.cuda import cuda_choices


class EnoughSteps(BaseException):
    """The program has made all the optimizer steps that were asked for. No `except Exception` of the program catches it."""


class NeedsNetwork(OSError):
    """The program reached for the network."""


class StartsProcess(RuntimeError):
    """The program starts another process of its own."""


@dataclass
class Session:
    """What is seen of a program: the recorder, optimizer steps so far, and notes on what was left out, with the line."""

    recorder: ScriptRecorder
    steps: int | None = 2  # after so many the program is ended; None: never
    done: int = 0
    notes: dict[str, Line] = field(default_factory=dict)
    _seen: list[torch.optim.Optimizer] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a note, with the line that it was first due to."""
        self.notes.setdefault(text, running_line())

    def before_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        """The optimizer is about to step: its parameters and their gradients are known."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._mark(parameter, "parameters")
                if parameter.grad is not None:
                    self._mark(parameter.grad, "gradients")
        self.recorder.begin("step")

    def after_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        """It has stepped: its state is known. EnoughSteps after the last one asked for."""
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    self._mark(value, "optimizer")
        self.recorder.begin("forward")
        self.done += optimizer not in self._seen or not self._others(optimizer)
        self._seen.append(optimizer)
        if self.steps is not None and self.done >= self.steps:
            raise EnoughSteps

    def _others(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether other optimizers step too: then a step is done when the first of them comes round."""
        return bool(self._seen) and optimizer is not self._seen[0] and self._seen.count(optimizer) > 0

    def _mark(self, tensor: Tensor, category: str) -> None:
        storage = self.recorder.of(tensor)
        if storage is not None and storage.category in ("", "activations"):
            storage.category, storage.saved_by = category, None

    def mark_models(self) -> None:
        """Name the parameters and buffers of every module that has run."""
        for module in list(self.recorder.names):
            place = self.recorder.place_of(module)
            for kind, named in (("parameters", module._parameters), ("buffers", module._buffers)):
                for name, tensor in named.items():
                    storage = self.recorder.of(tensor) if tensor is not None and not tensor.is_sparse else None
                    if storage is not None and (kind == "parameters" or storage.category == ""):
                        storage.category, storage.saved_by = kind, None
                        storage.site, storage.op = storage.site._replace(module=place[1]), name


@contextlib.contextmanager
def on_make_believe_gpu(session: Session, gpu: Gpu | None, ranks: int = 1) -> Iterator[None]:
    """Within it this thread's PyTorch runs on that GPU, which holds nothing but records. Not reentrant, global to the process."""
    recorder = session.recorder
    with contextlib.ExitStack() as stack:
        patches = stack.enter_context(Patches())
        answer_cuda(patches, recorder, gpu, ranks)
        import_without_gpu(patches)
        stack.enter_context(cuda_choices())
        stack.enter_context(autocast_for_cuda())
        _phases(patches, session)
        _left_out(patches, session)
        _refused(patches)
        lists = sys.modules[
            "torch.optim.optimizer"
        ]._foreach_supported_types  # by these an optimizer chooses its kernels over lists
        stack.callback(lists.remove, FakeTensor)
        lists.append(FakeTensor)
        one_of_many_ranks(patches, recorder, ranks)
        weights_from_config(patches, session.note)
        for hook in (
            register_optimizer_step_pre_hook(session.before_step),
            register_optimizer_step_post_hook(session.after_step),
        ):
            stack.callback(hook.remove)
        stack.enter_context(fake_tensors_on_gpu(recorder))
        for mode in (recorder.fake, recorder, recorder.modules(), recorder.saves(), recorder.resizes()):
            stack.enter_context(mode)
        stack.enter_context(DeviceCalls(recorder, ranks))
        try:
            yield
        finally:
            session.mark_models()


def _phases(patches: Patches, session: Session) -> None:
    """Forward begins with the first module's call, backward with autograd's."""
    recorder = session.recorder
    backward, enter = torch.autograd.backward, recorder._enter

    def in_backward(*args: Any, **kwargs: Any) -> None:
        for storage in recorder.live():
            if storage.saved_by is not None:
                storage.category = storage.category or "activations"
        phase = recorder.phase  # that of the step, where an optimizer's closure calls
        recorder.begin("backward")
        try:
            backward(*args, **kwargs)
        finally:
            recorder.begin(phase)

    def entering(module: torch.nn.Module) -> None:
        if recorder.phase == "setup":
            recorder.begin("forward")
        enter(module)

    patches.set(torch.autograd, "backward", in_backward)
    patches.set(recorder, "_enter", entering)


def _left_out(patches: Patches, session: Session) -> None:
    """What a trace does otherwise than the program says: no workers, no compiling, no files of weights, no skipped steps."""
    loader = torch.utils.data.DataLoader
    init = loader.__init__

    @functools.wraps(init)
    def without_workers(self: Any, *args: Any, **kwargs: Any) -> None:
        alone = {
            "num_workers": 0,
            "prefetch_factor": None,
            "persistent_workers": False,
            "multiprocessing_context": None,
        }
        init(
            self,
            *args[:5],
            **{**dict(zip(_LOADER[5:], args[5:], strict=False)), **kwargs, **alone, "pin_memory": False},
        )

    def as_it_is(model: Any = None, **kwargs: Any) -> Any:
        session.note("torch.compile is left out: the eager step is traced, which keeps more than a compiled one")
        return model if model is not None else lambda function: function

    def not_saved(*args: Any, **kwargs: Any) -> None:
        session.note("torch.save is left out: fake tensors have no values")

    patches.set(loader, "__init__", without_workers)
    patches.set(torch, "compile", as_it_is)
    patches.set(torch.nn.Module, "compile", lambda self, *args, **kwargs: as_it_is(self) and None)
    patches.set(torch, "save", not_saved)
    patches.set(
        torch.amp.GradScaler, "_maybe_opt_step", lambda self, optimizer, state, *a, **k: optimizer.step(*a, **k)
    )


_LOADER = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory")


def _refused(patches: Patches) -> None:
    """No network and no further processes."""

    def no_network(*args: Any, **kwargs: Any) -> Any:
        raise NeedsNetwork("a traced program has no network")

    def no_process(*args: Any, **kwargs: Any) -> Any:
        raise StartsProcess("a traced program starts no process")

    import multiprocessing.process

    patches.set(socket.socket, "connect", no_network)
    patches.set(socket, "getaddrinfo", no_network)
    for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp"):
        patches.set(os, name, no_process)
    patches.set(multiprocessing.process.BaseProcess, "start", no_process)
