"""torch.cuda, answered for a GPU that is not there: its name, its memory, its streams, its random numbers."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from calc.hardware import Gpu
from calc.units import GiB
from measure.script.device_calls import WrongGpu, device_of
from measure.script.recorder import ScriptRecorder

_UNKNOWN_CAPABILITY = "8.0"  # flash attention, bf16 and tf32: what the attention kernels here are chosen for


class Patches:
    """Attributes of other modules, replaced until the end of a `with`."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def also(self, undo: Callable[[], Any]) -> None:
        """Do this at the end too."""
        self._stack.callback(undo)

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace `owner.name`; returns what was there, or None."""
        missing = object()
        kept = vars(owner).get(name, missing)
        self._stack.callback(
            delattr if kept is missing else setattr, owner, name, *(() if kept is missing else (kept,))
        )
        found = getattr(owner, name, None)
        setattr(owner, name, value)
        return found


class _Stream:
    """A stream, or an event on one: everything is done at once, in the order of the program."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.stream_id = self.cuda_stream = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def _nothing(self, *args: Any, **kwargs: Any) -> Any: ...

    synchronize = wait = wait_event = wait_stream = record = _nothing

    def record_event(self, event: Any = None) -> _Stream:
        return event if event is not None else _Stream()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, other: Any) -> float:
        return 1.0  # milliseconds; nothing was timed


def answer_cuda(patches: Patches, recorder: ScriptRecorder, gpu: Gpu | None, gpus: int) -> None:
    """Let torch.cuda answer as if `gpus` of that GPU were there, of which this process uses the first."""
    for name, value in {**_about(gpu, gpus), **_memory(recorder, gpu), **_random(), **_streams()}.items():
        patches.set(torch.cuda, name, value)
    patches.set(torch.version, "cuda", "13.0")
    patches.set(torch.accelerator, "is_available", lambda: True)
    patches.set(torch.accelerator, "device_count", lambda: gpus)
    patches.set(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    for name in ("synchronize", "empty_cache", "current_device_index", "set_device_index"):
        patches.set(torch.accelerator, name, lambda *args: 0)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"):
        patches.set(torch.accelerator, name, getattr(torch.cuda, name))
    patches.set(torch.accelerator, "current_stream", _Stream)
    patches.set(torch.accelerator, "reset_peak_memory_stats", torch.cuda.reset_peak_memory_stats)


def _about(gpu: Gpu | None, gpus: int) -> dict[str, Any]:
    title = gpu.title if gpu else "A GPU without a limit"
    major, minor = ((gpu and gpu.compute_capability) or _UNKNOWN_CAPABILITY).split(".")
    properties = SimpleNamespace(
        name=title,
        major=int(major),
        minor=int(minor),
        total_memory=_total(gpu),
        multi_processor_count=108,
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        uuid="make-believe",
        L2_cache_size=40 * 2**20,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=164 * 2**10,
        regs_per_multiprocessor=65536,
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "device_count": lambda: gpus,
        "current_device": lambda: 0,
        "set_device": lambda device: _checked(device, gpus),
        "device": _device_context,
        "get_device_name": lambda device=None: title,
        "get_device_capability": lambda device=None: (int(major), int(minor)),
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "is_bf16_supported": lambda including_emulation=True: including_emulation or int(major) >= 8,
        "is_tf32_supported": lambda: int(major) >= 8,
        "can_device_access_peer": lambda device, peer: True,
        "utilization": lambda device=None: 0,
    }


def _device_context(device: Any) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


def _memory(recorder: ScriptRecorder, gpu: Gpu | None) -> dict[str, Any]:
    def reset(device: Any = None) -> None:
        recorder.peak_since_reset = recorder.now

    def stats(device: Any = None) -> dict[str, int]:
        values = {"current": recorder.now, "peak": recorder.peak_since_reset}
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
        known = {f"{kind}.all.{name}": value for kind in kinds for name, value in values.items()}
        return {**known, "num_alloc_retries": 0, "num_ooms": 0}

    now: Callable[..., int] = lambda device=None: recorder.now  # noqa: E731
    most: Callable[..., int] = lambda device=None: recorder.peak_since_reset  # noqa: E731
    return {
        **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached", "device_memory_used"), now),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), most),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), reset),
        **dict.fromkeys(("reset_accumulated_memory_stats", "empty_cache", "ipc_collect"), _nothing),
        "memory_stats": stats,
        "mem_get_info": lambda device=None: (max(0, _total(gpu) - recorder.now), _total(gpu)),
        "memory_summary": lambda device=None, abbreviated=False: f"{recorder.now} bytes allocated",
        "set_per_process_memory_fraction": _nothing,
    }


def _random() -> dict[str, Any]:
    return {
        **dict.fromkeys(("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all"), _nothing),
        **dict.fromkeys(("seed", "seed_all", "initial_seed"), lambda: 0),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
    }


def _streams() -> dict[str, Any]:
    return {
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        **dict.fromkeys(("current_stream", "default_stream"), _Stream),
        "set_stream": _nothing,
        "synchronize": _nothing,
        "is_current_stream_capturing": lambda: False,
    }


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _total(gpu: Gpu | None) -> int:
    return (gpu and gpu.memory_bytes) or 1024 * GiB


def _checked(device: Any, gpus: int) -> None:
    found = device_of(device)
    if found is not None and (found.index or 0) >= gpus:
        raise WrongGpu(f"GPU {found.index} is asked for, of {gpus}; --ranks N gives the program N of them")


class _ImportedWithoutGpu(MetaPathFinder, Loader):
    """Imports packages that load CUDA's libraries as they are imported on a machine without a GPU."""

    names = ("bitsandbytes",)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self.names and self in sys.meta_path else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        sys.meta_path.remove(self)
        sys.modules.pop(spec.name, None)
        with Patches() as patches:
            patches.set(torch.cuda, "is_available", lambda: False)
            patches.set(torch.version, "cuda", None)
            return importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def import_without_gpu(patches: Patches) -> None:
    """Let packages that would look for CUDA's libraries be imported as on a CPU."""
    finder = _ImportedWithoutGpu()
    sys.meta_path.insert(0, finder)
    patches.also(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)


@contextlib.contextmanager
def autocast_for_cuda() -> Iterator[None]:
    """Within it, autocast for `cuda` is the CPU's, whose lists `cuda_choices` has made CUDA's."""
    with Patches() as patches:
        autocast = torch.amp.autocast_mode.autocast
        init = autocast.__init__

        def made(
            self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            if device_type == "cuda":
                device_type, dtype = "cpu", dtype or _cuda_dtype[0]
            init(self, device_type, dtype, enabled, cache_enabled)

        _cuda_dtype = [torch.float16]  # what torch.autocast("cuda") takes when it is not told
        patches.set(autocast, "__init__", made)
        asked, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
        patches.set(torch, "is_autocast_enabled", lambda device="cpu": asked("cpu" if device == "cuda" else device))
        patches.set(torch, "get_autocast_dtype", lambda kind: dtype_of("cpu" if kind == "cuda" else kind))
        patches.set(torch, "get_autocast_gpu_dtype", lambda: dtype_of("cpu"))
        yield
