"""Runs a workload in a process of its own and passes on what it tells: progress, rows, and how it ended.

Whatever happens to that process (it hangs, it is killed, it takes the driver down with it), this one gets an answer, and the
process group that it led is gone when `run` returns.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import IO, Any, Final

from calc.child_environment import child_environment
from calc.errors import InputError
from calc.measurements.records import Records
from measure.run_options import RunOptions

Event = dict[str, Any]

CHILD: Final = (sys.executable, "-m", "measure.child")
# threads of a parallel loop that wait spinning keep the processors from those that they wait for, on a machine that is busy
_PATIENT: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
_POLL_SECONDS = 0.1
_AT_ONCE = 100  # events taken before cancel and deadline are looked at again
_KEPT_LINES = 20  # of the child's standard error, for the message of a crash


def run(options: RunOptions, cancel: threading.Event, command: Sequence[str] = CHILD) -> Iterator[Event]:
    """The events of one run as they come; `cancel` ends it from outside.

    `queued` (device, ahead), `started` (run, device, seconds), and for each workload `ready` (run, workload, device, environment),
    `progress` (fraction of the whole, message, seconds_left), `row` and `part` (run, workload, outcome, message); the last is always
    `done` (outcome, message, run, rows: how many were told). Outcomes: "finished", "cancelled", "timed out",
    "out of memory", "refused" (bad input), "failed".
    """
    if sys.platform == "win32":
        raise InputError("measure run: Windows has no process groups as they are needed here; use WSL, Linux or macOS")
    child = _Child(command, options)
    try:
        yield from _watched(child, cancel)
    finally:
        child.kill()


def _watched(child: _Child, cancel: threading.Event) -> Iterator[Event]:
    told = _Told()
    while not (told.done or child.is_over or cancel.is_set() or time.monotonic() > told.deadline):
        yield from told.noted(child.next_events())
    outcome, message = _ended(child, cancel.is_set(), told)
    child.kill()
    while not child.is_over:  # rows that were saved and told, but not read yet
        yield from told.noted(child.next_events())
    if not told.done:
        if told.run:
            _note(told.run, outcome, message)
        told.done = {"event": "done", "outcome": outcome, "message": message}
    yield told.done | {"run": told.run, "rows": told.rows}


class _Told:
    """What the child has told so far."""

    def __init__(self) -> None:
        self.run = ""
        self.rows = 0
        self.seconds = 0.0
        self.deadline = float("inf")
        self.done: Event = {}

    def noted(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events as they pass, all but `done`. The clock runs while the child has the device, not while it waits for it."""
        for event in events:
            kind = event["event"]
            if kind == "done":
                self.done = event
                return
            if kind == "started":
                self.run, self.seconds = event["run"], event["seconds"]
                self.deadline = time.monotonic() + self.seconds
            elif kind == "ready":
                self.run = event["run"]  # a suite has one for each workload
            elif kind == "queued":
                self.deadline = float("inf")
            self.rows += kind == "row"
            yield event


def _ended(child: _Child, cancelled: bool, told: _Told) -> tuple[str, str]:
    """How a run ended, when it did not say so itself."""
    if cancelled:
        return "cancelled", "cancelled; finished rows are kept"
    if not child.is_over:
        return "timed out", f"the time limit of {told.seconds:g} s was reached; finished rows are kept"
    return "failed", f"the measuring process {child.how_it_ended()}; finished rows are kept"


def _note(identity: str, outcome: str, message: str) -> None:
    """Write down how the run ended. A store that fails must not hide it."""
    try:
        Records().end(identity, outcome, message)
    except InputError as error:
        print(error, file=sys.stderr)


class _Child:
    """The measuring process, the leader of its own group and session, and what it says."""

    def __init__(self, command: Sequence[str], options: RunOptions) -> None:
        self._process = subprocess.Popen(
            [*command, options.model_dump_json()],
            stdin=subprocess.PIPE,  # never written to: its end tells the child that we are gone
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=child_environment(defaults=_PATIENT),
        )
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self.is_over = False
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_events, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_events(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._errors.append(line.decode(errors="replace").rstrip())

    def next_events(self) -> list[Event]:
        """What it has said since the last call; waits a moment when that is nothing. `is_over` once there will be no more."""
        events: list[Event] = []
        while len(events) < _AT_ONCE and not self.is_over:
            try:
                line = self._lines.get(timeout=0 if events else _POLL_SECONDS)
            except queue.Empty:
                break
            self.is_over = line is None or not line.endswith(b"\n")  # the end, or a line that the child's death cut
            if line and not self.is_over:
                events.append(json.loads(line))
        return events

    def how_it_ended(self) -> str:
        self.kill()
        code = self._process.returncode
        said = next((f" ({line})" for line in reversed(self._errors) if line.strip()), "")
        if code >= 0:
            return f"ended with exit status {code}{said}"
        hint = " (out of memory, most likely)" if -code == signal.SIGKILL else said
        return f"was ended by signal {signal.Signals(-code).name}{hint}"

    def kill(self) -> None:
        """End the process and all that it started, and wait until it is gone."""
        if self._process.returncode is not None:
            return  # done before: the number of the group may be another's by now
        with suppress(ProcessLookupError, PermissionError):  # macOS says "not permitted" of a group of zombies
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join(timeout=1)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()
