"""The trace in a child process: it ends with the one that asked, within its time, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from calc.child_environment import child_environment
from calc.errors import InputError
from measure.trace.options import TraceOptions

_POLL_SECONDS = 0.2


class Stopped(Exception):
    """The trace was ended from outside."""


def observe(
    config: Mapping[str, Any],
    options: TraceOptions,
    seconds: float,
    told: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Trace in a child process that ends with this one and within `seconds`. `told` gets its progress, a line at a time.

    Stopped soon after `stopped()` turns true; InputError when it takes too long or cannot be done.
    """
    request = json.dumps({"config": config, "options": asdict(options)})
    with _child(told) as child:
        try:
            output = _output(child, request, time.monotonic() + seconds, stopped)
        except TimeoutError:
            raise InputError.of(
                "--seconds", seconds, "the trace took longer and was stopped; allow more, or shorten --seq"
            ) from None
        finally:
            child.kill()
    if child.returncode != 0 or not output:
        raise InputError(f"the trace ended with status {child.returncode} and no answer (out of memory?)")
    answer: dict[str, Any] = json.loads(output)
    if "error" in answer:
        raise InputError(answer["error"], answer["field"])
    return answer


def _child(told: Callable[[str], None]) -> subprocess.Popen[str]:
    """The child, with a thread that passes on the lines of its standard error until that ends."""
    read, write = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "measure.trace"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=write,
            text=True,
            env=_environment(),
        )
    finally:
        os.close(write)
    threading.Thread(target=_pass_on, args=(read, told), daemon=True).start()
    return child


def _pass_on(read: int, told: Callable[[str], None]) -> None:
    with os.fdopen(read, errors="replace") as lines:
        for line in lines:
            told(line.rstrip("\n"))


def _output(child: subprocess.Popen[str], request: str, deadline: float, stopped: Callable[[], bool]) -> str:
    """What the child prints. TimeoutError at the deadline, Stopped when it is to end."""
    given: str | None = request
    ended = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and ended is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the child is killed too
    try:
        while True:
            try:
                return child.communicate(given, timeout=_POLL_SECONDS)[0]
            except subprocess.TimeoutExpired:
                given = None  # it is on its way
            if stopped():
                raise Stopped
            if time.monotonic() > deadline:
                raise TimeoutError
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ended)


def _environment() -> dict[str, str]:
    """No network, no downloads, no stray threads: the child builds from the config alone."""
    return child_environment(
        {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    )
