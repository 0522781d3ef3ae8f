"""The process that measures: `python -m measure.child OPTIONS-AS-JSON`, started by measure.runner and by nothing else.

It holds its place in the device's queue, saves every row before it tells of it, and dies with whoever started it: its standard
input is a pipe from there, and the end of that pipe is the end of this process and of all it started.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from calc.errors import InputError
from calc.measurements.records import Records
from calc.units import MiB, show_bytes
from measure.device_queue import Ticket
from measure.devices import NO_TORCH, Device, free_memory, likely, lock_name, resolve
from measure.run_options import RunOptions
from measure.setting import Setting
from measure.workloads import WORKLOADS
from measure.workloads.cases import is_out_of_memory

_POLL_SECONDS = 0.2
_TRUSTED_SECONDS = 5.0  # of the usual time, as if they had been seen: a guess of the time left begins there
_LEAST_MEMORY = 256 * MiB  # of a GPU, for the smallest workload
_GRACE_SECONDS = 30  # beyond the time limit, which the runner enforces: then this process ends itself

Tell = Callable[..., None]


def main(argv: list[str]) -> int:
    """Run one workload, or a suite, and tell of it as JSON lines on standard output.

    `queued`, `started`, then for each workload `ready`, `progress`, `row` and `part` (how it ended), and at last `done`.
    """
    options = RunOptions.model_validate_json(argv[0])
    tell = teller()
    threading.Thread(target=die_with_parent, daemon=True).start()
    ended = _guarded(options.size, lambda: _measure_all(options, tell))
    tell("done", outcome=ended.outcome, message=ended.message)
    return 0


def teller() -> Tell:
    """A function that writes events to what was standard output; prints of libraries go to standard error from now on."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(event: str, **values: Any) -> None:
        try:
            pipe.write(json.dumps({"event": event, **values}) + "\n")
            pipe.flush()
        except BrokenPipeError:  # who listened is gone
            os.killpg(0, signal.SIGKILL)

    return tell


def die_with_parent(last: Callable[[], object] = lambda: None) -> None:
    """Wait for the end of standard input, do the `last` thing, then end this process's group."""
    while os.read(0, 4096):
        pass
    last()
    os.killpg(0, signal.SIGKILL)


class Ended(NamedTuple):
    """How a run ended and, unless it finished, why."""

    outcome: str
    message: str


def _guarded(size: str, action: Callable[[], Ended]) -> Ended:
    """Do it; what it raises becomes how it ended."""
    try:
        return action()
    except InputError as error:
        return Ended("refused", str(error))
    except ModuleNotFoundError as error:
        return Ended(
            "failed",
            NO_TORCH if error.name == "torch" else f"{error.name} is not installed; `make test` installs it",
        )
    except Exception as error:
        if is_out_of_memory(error):
            return Ended(
                "out of memory",
                f"{size} does not fit in the memory that the run may take; choose a smaller size, or end what else takes memory",
            )
        traceback.print_exc()  # to the runner, which keeps the end of it
        return Ended("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _measure_all(options: RunOptions, tell: Tell) -> Ended:
    """Every workload that was asked for, each a run of its own in the store. A suite passes over what does not work here."""
    first = uuid.uuid4().hex
    with _device(options, first, tell) as device:
        _guard_memory(device, options.memory_fraction)
        from measure.environment import environment

        about, clock, over = environment(device), Clock(options.workloads), []
        for name in options.workloads:
            part = Part(name, first or uuid.uuid4().hex, device, about)
            first = ""
            Records().begin(part.run, name, options.model_dump() | {"workload": name}, about)
            tell("ready", run=part.run, workload=name, device=device.as_json(), environment=about)
            ended = _guarded(options.size, partial(_measure, part, options, clock, tell))
            gc.collect()  # before the next: models are full of reference cycles
            ended = _noted(part.run, ended)
            tell("part", run=part.run, workload=name, outcome=ended.outcome, message=ended.message)
            if len(options.workloads) == 1:
                return ended
            clock.finished(name)
            over += [f"{name}: {ended.message}"] if ended.outcome != "finished" else []
    return Ended("finished", "; ".join(("not measured", *over)) if over else "")


def _noted(run: str, ended: Ended) -> Ended:
    """Write down how it ended. A store that fails is told too: the message still gets out."""
    try:
        Records().end(run, ended.outcome, ended.message)
    except InputError as error:
        if str(error) not in ended.message:
            return Ended("refused", f"{ended.message} ({error})" if ended.message else str(error))
    return ended


class Part(NamedTuple):
    """One workload of a run: its name, its run in the store, and what it is measured on and with."""

    workload: str
    run: str
    device: Device
    environment: dict[str, Any]


def _measure(part: Part, options: RunOptions, clock: Clock, tell: Tell) -> Ended:
    """One workload to its end; each row is saved before it is told."""

    def progress(fraction: float, message: str) -> None:
        whole = clock.fraction(part.workload, fraction)
        tell("progress", fraction=whole, message=message, seconds_left=clock.seconds_left(whole))

    workload = WORKLOADS[part.workload]
    model = options.model if workload.takes_model else ""
    for row in workload.run(Setting(part.device, options.size, progress, model, options.ranks)):
        try:
            Records().add(part.run, row)
        finally:  # a row that a full disk keeps out of the store is still shown
            values = row.as_json(part.workload, part.environment)
            tell("row", **values, run=part.run, started=part.environment["time"])
    return Ended("finished", "")


class Clock:
    """How much of all the workloads is done, each by its share of their usual time, and how long the rest may take."""

    def __init__(self, names: Sequence[str]) -> None:
        self._usual = sum(WORKLOADS[name].seconds for name in names)
        self._shares = {name: WORKLOADS[name].seconds / self._usual for name in names}
        self._done = 0.0
        self._began = time.monotonic()

    def fraction(self, name: str, fraction: float) -> float:
        """The fraction of the whole when so much of that workload is done."""
        return self._done + self._shares[name] * fraction

    def finished(self, name: str) -> None:
        self._done += self._shares[name]

    def seconds_left(self, fraction: float) -> float:
        """A guess: the usual time at first, and more and more the pace that is seen."""
        weight = min(_TRUSTED_SECONDS, self._usual)
        pace = (time.monotonic() - self._began + weight) / (fraction + weight / self._usual)
        return pace * (1 - fraction)


@contextmanager
def _device(options: RunOptions, run: str, tell: Tell) -> Iterator[Device]:
    """The device, ours alone until the end. torch is imported only once it is: those who wait cost little memory."""
    about = {
        "run": run,
        "workload": options.workload,
        "size": options.size,
        "process": os.getpid(),
        "since": time.time(),
    }
    wanted = likely(options.device)
    with ExitStack() as held:
        _wait(held.enter_context(Ticket(lock_name(wanted), about)), wanted, tell)
        _start(options, run, wanted, tell)
        device = resolve(options.device)
        if device.name != wanted:  # a driver without a card, say: the guess was wrong, so queue where the run will be
            held.close()
            _wait(held.enter_context(Ticket(lock_name(device.name), about)), device.name, tell)
            _start(options, run, device.name, tell)
        yield device


def _wait(ticket: Ticket, device: str, tell: Tell) -> None:
    """Return when the device is ours; tell who is ahead whenever that changes."""
    told: list[dict[str, Any]] = []
    while ahead := ticket.ahead():
        if ahead != told:
            tell("queued", device=device, ahead=ahead)
            told = ahead
        time.sleep(_POLL_SECONDS)


def _start(options: RunOptions, run: str, device: str, tell: Tell) -> None:
    """From here the time limit runs. The timer below needs no cooperation from Python: it ends a process stuck in a driver."""
    faulthandler.dump_traceback_later(options.seconds + _GRACE_SECONDS, exit=True)
    tell("started", run=run, device=device, seconds=options.seconds)


def _guard_memory(device: Device, fraction: float) -> None:
    """Bound what the run may take: on a GPU through torch's allocator, on the CPU through the system (Linux; macOS does not enforce it).

    InputError when another process leaves too little of a GPU.
    """
    if device.kind != "cpu":
        import torch

        torch.cuda.set_device(device.name)  # events, streams and Triton's launches go to the current device
        free, total = torch.cuda.mem_get_info(device.name)
        if fraction * free < _LEAST_MEMORY:
            raise InputError(
                f"--device: {device.name} has {show_bytes(free)} of {show_bytes(total)} free: another process fills it "
                "(nvidia-smi lists them); end that, or choose --device cpu"
            )
        torch.cuda.set_per_process_memory_fraction(fraction * free / total, device.name)
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(fraction * free_memory())
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
