"""Runs of stand-ins for a measuring process, for tests of what becomes of a run."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from calc.measurements.records import Records
from measure.device_queue import queue
from measure.run_options import RunOptions
from measure.runner import run

SCRIPT = Path(__file__).parent / "misbehaving.py"
PATIENCE = 20.0  # seconds until a test gives up waiting


def stand_in(behaviour):
    return (sys.executable, str(SCRIPT), behaviour, "child")


def events_of(behaviour, cancel=None, **options):
    options = RunOptions(workload="decoder-states", device="cpu", **options)
    return run(options, cancel or threading.Event(), stand_in(behaviour))


def until(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def saved():
    return [row["quantity"] for row in Records().rows()]


def alive(pid):
    """Whether a process still runs; one that is dead but not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_free():
    return queue("cpu") == []


def started(behaviour, *flags, **options):
    """A runner in its own process, as the page and the terminal start it."""
    command = [
        sys.executable,
        str(SCRIPT),
        behaviour,
        "run",
        "decoder-states",
        "--device",
        "cpu",
        "--format",
        "jsonl",
        *flags,
    ]
    path = str(SCRIPT.parents[2])
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        **options,
    )


def finish(process):
    """What a runner still says, and its exit status."""
    out, errors = process.communicate(timeout=PATIENCE)
    return [json.loads(line) for line in out.splitlines() if line.endswith(b"}")], errors.decode(), process.returncode
