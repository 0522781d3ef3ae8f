"""What a result was measured with: device, driver, programs, commit and time, kept with every row."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from calc.version import VERSION
from measure.devices import Device

_ROOT = Path(__file__).parent.parent


def environment(device: Device) -> dict[str, Any]:
    """The environment of a run on that device; imports torch. What cannot be told is ""."""
    import torch

    return {
        "device": device.title,
        "kind": device.kind,
        "catalogue": device.catalogue,
        "memory_bytes": device.memory_bytes,
        "driver": _driver(device),
        "runtime": torch.version.cuda or torch.version.hip or "",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "version": VERSION,
        "commit": _output("git", "-C", str(_ROOT), "rev-parse", "HEAD"),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver(device: Device) -> str:
    if device.kind == "cuda":
        found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        return found.splitlines()[0] if found else ""
    if device.kind == "rocm":
        path = Path("/sys/module/amdgpu/version")
        return path.read_text(encoding="ascii").strip() if path.exists() else ""
    return os.uname().release


def _output(*command: str) -> str:
    """What a short command prints; "" when it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
