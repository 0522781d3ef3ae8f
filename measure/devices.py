"""What there is to measure on: CUDA and ROCm devices where there are any, and the CPU always.

Nothing here has run on a GPU yet; the CPU's paths have.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from calc.errors import InputError
from calc.units import KiB

# the driver's name of a device, and its row in the catalogue of hardware; what is not here has no data-sheet figures
CATALOGUE: Final[Mapping[str, str]] = {
    "NVIDIA B200": "b200-180gb",
    "NVIDIA H200": "h200-141gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA L40S": "l40s-48gb",
    "NVIDIA L4": "l4-24gb",
    "NVIDIA A10": "a10-24gb",
    "NVIDIA GeForce RTX 4090": "rtx-4090-24gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090-24gb",
    "Tesla V100-SXM2-32GB": "v100-sxm-32gb",
    "Tesla T4": "t4-16gb",
    "AMD Instinct MI300X": "mi300x-192gb",
}
DEVICE_FORM: Final = re.compile(r"auto|cpu|cuda(:\d{1,2})?")
_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's driver, AMD's, and either under WSL
NO_TORCH: Final = (
    "PyTorch is not installed in this Python; `make run` installs it in the background, `make test` at once"
)


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `name` is what --device takes; `kind` is "cuda", "rocm" or "cpu"; `memory_bytes` as its driver (or the system) shows it;
    `catalogue` names its row in the hardware catalogue, "" when it has none."""

    name: str
    kind: str
    title: str
    memory_bytes: int
    catalogue: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def devices() -> list[Device]:
    """Every device, GPUs first; imports torch. InputError when torch is missing."""
    return [*_gpus(), Device("cpu", "cpu", _processor(), total_memory())]


def resolve(wanted: str) -> Device:
    """The device of that name; "auto" is the first GPU, or the CPU where there is none. InputError lists those there are."""
    found = {device.name: device for device in devices()}
    name = {"auto": next(iter(found)), "cuda": "cuda:0"}.get(wanted, wanted)
    if name not in found:
        reason = why_no_gpu()
        raise InputError.of(
            "--device", wanted, f"this machine has {', '.join(found)}" + (f"; {reason}" if reason else "")
        )
    return found[name]


def likely(wanted: str) -> str:
    """The name that `resolve` will most likely give, told without importing torch: a queue must not cost its waiters memory."""
    if wanted == "auto":
        return "cuda:0" if any(Path(node).exists() for node in _GPU_NODES) and not _is_cpu_build() else "cpu"
    return "cuda:0" if wanted == "cuda" else wanted


def surely_no_gpu() -> str:
    """Why there is no GPU here, where that is plain without importing torch; "" where only torch can tell."""
    return f"no GPU: the installed torch {version('torch')} is a CPU build" if _is_cpu_build() else ""


def lock_name(device: str) -> str:
    """One name for one piece of hardware, whatever index CUDA_VISIBLE_DEVICES gives it in this process."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return device
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        visible = [each.strip() for each in os.environ.get(variable, "").split(",") if each.strip()]
        if int(index) < len(visible):
            return "cuda-" + re.sub(r"[^A-Za-z0-9-]", "_", visible[int(index)])
    return f"cuda-{index}"


def _gpus() -> list[Device]:
    try:
        import torch
    except ModuleNotFoundError:
        raise InputError(NO_TORCH) from None
    if not torch.cuda.is_available():
        return []
    kind = "rocm" if torch.version.hip else "cuda"
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(Device(f"cuda:{index}", kind, facts.name, facts.total_memory, CATALOGUE.get(facts.name, "")))
    return found


def _is_cpu_build() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def why_no_gpu() -> str:
    """Why nothing runs on a GPU here; "" when it can. Imports torch."""
    import torch

    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"no GPU: the installed torch {torch.__version__} is a CPU build"
    return "no GPU: torch finds none (is there one, and is its driver new enough for this torch?)"


def why_no_triton() -> str:
    """Why Triton's kernels cannot be measured here; "" when they can."""
    if find_spec("triton") is None:
        return "no Triton: it is not installed (it has no build for macOS and Windows); workloads measure torch's kernels alone"
    return (
        ""
        if not why_no_gpu()
        else "no Triton: its kernels compile for GPUs alone; workloads measure torch's on the CPU"
    )


def _processor() -> str:
    """The processor's name, as Linux tells it; its architecture elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def total_memory() -> int:
    """Bytes of the machine's memory, or of this container's share where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share = _number("/sys/fs/cgroup/memory.max")
    return min(physical, share) if share else physical


def free_memory() -> int:
    """Bytes that a new program can take without swapping, in this container's share where that is less."""
    free = total_memory()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * KiB for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass  # not Linux: the whole memory is the best that can be told
    share, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    return min(free, max(share - used, 0)) if share else free


def _number(path: str) -> int:
    """The whole number in a file of the kernel; 0 when there is none ("max" means no limit)."""
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0
