"""Starts the ranks of a run on this machine and passes on their rows. torch is imported by them, not by this."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from calc.child_environment import child_environment
from calc.errors import InputError
from calc.measurements.records import Measured
from measure.distributed.order import FOLDER, Order
from measure.setting import Setting

Tell = Callable[[float, str], None]

RANK: Final = "measure.distributed.rank"
MOST_RANKS: Final = 16
_CPU_RANKS = 2  # when nobody says
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10  # for the agent to end by itself


def run(name: str, setting: Setting) -> Iterator[Measured]:
    """A job of `measure.distributed.JOBS` as a workload: on every GPU, or on gloo processes, or on as many as `setting.ranks` says.

    InputError when there are not so many devices.
    """
    ranks = _ranks(setting)
    fraction = 1.0
    with ExitStack() as held:
        if setting.device.kind != "cpu":
            import torch

            fraction = torch.cuda.get_per_process_memory_fraction(setting.device.name)
            _wait_for_others(held, name, ranks, setting)
        setting.tell(0.0, f"starting {ranks} ranks on {setting.device.title}")
        yield from launched(
            Order((name,), setting.device.kind, setting.size, memory_fraction=fraction), ranks, setting.tell
        )


def _ranks(setting: Setting) -> int:
    if setting.device.kind == "cpu":
        return setting.ranks or _CPU_RANKS
    import torch

    count = torch.cuda.device_count()
    if setting.device.name != "cuda:0":
        raise InputError.of("--device", setting.device.name, "several GPUs are measured from cuda:0 on")
    if count < 2 or setting.ranks > count:
        asked = f"{setting.ranks} ranks need as many GPUs" if setting.ranks else "this needs two GPUs or more"
        raise InputError(f"--ranks: {asked} and this machine has {count}; --device cpu runs gloo processes", "--ranks")
    return setting.ranks or count


def _wait_for_others(held: ExitStack, name: str, ranks: int, setting: Setting) -> None:
    """Have the other GPUs too. All such runs start from the first GPU and go up, so that none waits for one that waits for it."""
    import time

    from measure.device_queue import Ticket
    from measure.devices import lock_name

    about = {"workload": name, "process": os.getpid(), "since": time.time()}
    for index in range(1, ranks):
        ticket = held.enter_context(Ticket(lock_name(f"cuda:{index}"), about))
        while ticket.ahead():
            setting.tell(0.0, f"waiting for cuda:{index}, which another run has")
            time.sleep(_POLL_SECONDS)


def launched(order: Order, ranks: int, tell: Tell, what: str = RANK) -> Iterator[Measured]:
    """The rows of so many ranks on this machine, as they come; `what` is the module (or file) that each of them runs.

    Whatever happens, no rank is left when this returns; they end by themselves when this process is killed. InputError when a rank
    refuses, MemoryError or RuntimeError when one fails, with what it said.
    """
    folder = Path(tempfile.mkdtemp(prefix=FOLDER))
    agent = _Agent(replace(order, store=str(folder / "store")), ranks, folder, what)
    failures: dict[str, list[dict[str, Any]]] = {"refused": [], "failed": [], "ended": []}
    try:
        for event in agent.events():
            kind = event.pop("event")
            if kind == "row":
                yield Measured(**event)
            elif kind == "progress":
                tell(event["fraction"], event["message"])
            else:
                failures[kind].append(event)
        code = agent.code()
        if code != 0:
            raise _error(failures, code)
    finally:
        agent.end()
        shutil.rmtree(folder, ignore_errors=True)


def _error(failures: Mapping[str, list[dict[str, Any]]], code: int) -> Exception:
    """What to raise: a refusal first; a rank that a signal ended, since the others only complain of its absence; what one said."""
    if failures["refused"]:
        return InputError(failures["refused"][0]["message"])
    ended = [end for end in failures["ended"] if end["code"] != -signal.SIGTERM]  # that is torchrun ending the rest
    for end in ended:
        if end["code"] < 0:
            hint = " (out of memory, most likely)" if -end["code"] == signal.SIGKILL else ""
            return RuntimeError(f"rank {end['rank']} was ended by {signal.Signals(-end['code']).name}{hint}")
    if failures["failed"]:
        return RuntimeError(failures["failed"][0]["message"])
    for end in ended:
        return RuntimeError(f"rank {end['rank']} ended with exit status {end['code']}")
    return RuntimeError(f"torchrun ended with exit status {code}")


class _Agent:
    """The process of measure.distributed.agent, in our process group, and what it and its ranks say."""

    def __init__(self, order: Order, ranks: int, folder: Path, what: str) -> None:
        command = (sys.executable, "-m", "measure.distributed.agent", str(ranks), str(folder), what, order.as_json())
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # never written to: its end tells the agent and every rank that we are gone
            stdout=subprocess.PIPE,
            env=_environment(ranks),
        )
        assert self._process.stdout is not None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._lines.put(line)
        self._lines.put(None)

    def events(self) -> Iterator[dict[str, Any]]:
        """What is told, until all have closed their end, or the agent is gone and nothing more comes."""
        while True:
            try:
                line = self._lines.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._process.poll() is None:
                    continue
                return
            if line is None:
                return
            yield json.loads(line)

    def code(self) -> int:
        """The exit status of the agent, which ends a moment after its last rank."""
        return self._process.wait(timeout=_GRACE_SECONDS)

    def end(self) -> None:
        """End the ranks, by the end of their standard input, and the agent, and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=_GRACE_SECONDS)  # the pipe's other ends close with the last rank
        self._process.stdout.close()


def _environment(ranks: int) -> dict[str, str]:
    """Our own, and: the loopback interface alone unless the user chose another, no port for torchrun's store, the cores shared out."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    defaults = {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
    }
    return child_environment({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, defaults)


def on_several(name: str) -> Callable[[Setting], Iterator[Measured]]:
    """`run` of that job, as the table of workloads takes it."""
    return partial(run, name)
