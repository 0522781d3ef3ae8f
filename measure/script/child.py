"""The script's trace in a process group of its own: it ends with the one that asked, within its time and memory, with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from calc.child_environment import child_environment
from calc.errors import InputError


def observe_script(
    script: str,
    args: Sequence[str],
    gpu: Sequence[Any],
    *,
    steps: int = 2,
    ranks: int = 1,
    seconds: float = 120.0,
    memory_bytes: int = 8 * 2**30,
) -> dict[str, Any]:
    """Run the user's program in a child process and tell what it held. `gpu` are the arguments of `calc.hardware.chosen_gpu`.

    It is the user's own code, with the user's rights: nothing is kept from it but the network and further Python processes.
    InputError when it cannot be traced, and when it takes longer than `seconds`.
    """
    request = {
        "script": script,
        "args": list(args),
        "gpu": list(gpu),
        "steps": steps,
        "ranks": ranks,
        "memory_bytes": memory_bytes,
        "parent": os.getpid(),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "measure.script"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    kept = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the child is ended too
    try:
        output = child.communicate(json.dumps(request), timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        raise InputError.of("--seconds", seconds, "the program took longer and was ended; allow more") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        signal.signal(signal.SIGTERM, kept)
    if not output:
        raise InputError(
            f"--script: the program ended its process (status {child.returncode}) before it was answered", "--script"
        )
    answer: dict[str, Any] = json.loads(output)
    if "error" in answer:
        raise InputError(answer["error"], answer["field"])
    return answer


def _environment() -> dict[str, str]:
    """No network, no downloads, no stray threads."""
    return child_environment(
        {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
    )
