"""The trace in a child process: it ends with the one that asked, within its time, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calc.errors import InputError
from measure.trace.options import TraceOptions

_ROOT = Path(__file__).resolve().parents[2]


def observe(config: Mapping[str, Any], options: TraceOptions, seconds: float) -> dict[str, Any]:
    """Trace in a child process that ends with this one and within `seconds`. Its progress goes to standard error."""
    request = json.dumps({"config": config, "options": asdict(options)})
    command = [sys.executable, "-m", "measure.trace"]
    ended = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the child below is killed too
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
    ) as child:
        try:
            output, _ = child.communicate(request, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise InputError.of(
                "--seconds", seconds, "the trace took longer and was stopped; allow more, or shorten --seq"
            ) from None
        finally:
            child.kill()
            signal.signal(signal.SIGTERM, ended)
    if child.returncode != 0 or not output:
        raise InputError(f"the trace ended with status {child.returncode} and no answer (out of memory?)")
    answer: dict[str, Any] = json.loads(output)
    if "error" in answer:
        raise InputError(answer["error"], answer["field"])
    return answer


def _environment() -> dict[str, str]:
    """No network, no downloads, no stray threads: the child builds from the config alone."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
