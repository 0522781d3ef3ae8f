"""The process that measures: `python -m measure.child OPTIONS-AS-JSON`, started by measure.runner and by nothing else.

It holds its place in the device's queue, saves every row before it tells of it, and dies with whoever started it: its standard
input is a pipe from there, and the end of that pipe is the end of this process and of all it started.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from calc.errors import InputError
from calc.records import Records
from measure.device_queue import Ticket
from measure.devices import NO_TORCH, Device, free_memory, likely, lock_name, resolve
from measure.run_options import RunOptions
from measure.workloads import WORKLOADS, Setting

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 30  # beyond the time limit, which the runner enforces: then this process ends itself
_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")  # what torch and CUDA say

Tell = Callable[..., None]


def main(argv: list[str]) -> int:
    """Run one workload and tell of it as JSON lines on standard output: `queued`, `started`, `ready`, `progress`, `row`, `done`."""
    options = RunOptions.model_validate_json(argv[0])
    tell = _teller()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    run = uuid.uuid4().hex
    outcome, message = _measured(options, run, tell)
    if outcome != "finished":
        try:
            Records().end(run, outcome, message)
        except InputError as error:  # the store itself is what failed; the message still gets out
            message = f"{message} ({error})" if str(error) not in message else message
    tell("done", outcome=outcome, message=message)
    return 0


def _teller() -> Tell:
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


def _die_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _measured(options: RunOptions, run: str, tell: Tell) -> tuple[str, str]:
    """Run to the end; how it ended and, unless it finished, why."""
    records = Records()
    try:
        with _device(options, run, tell) as device:
            _guard_memory(device, options.memory_fraction)
            from measure.environment import environment

            about = environment(device)
            records.begin(run, options.workload, options.model_dump(), about)
            tell("ready", device=device.as_json(), environment=about)
            setting = Setting(
                device, options.size, lambda fraction, text: tell("progress", fraction=fraction, message=text)
            )
            for row in WORKLOADS[options.workload].run(setting):
                try:
                    records.add(run, row)
                finally:  # a row that a full disk keeps out of the store is still shown
                    tell("row", **row.as_json(options.workload, about), run=run, started=about["time"])
            records.end(run, "finished")
        return "finished", ""
    except InputError as error:
        return "refused", str(error)
    except ModuleNotFoundError as error:
        return (
            "failed",
            NO_TORCH if error.name == "torch" else f"{error.name} is not installed; `make test` installs it",
        )
    except Exception as error:
        if isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY):
            return (
                "out of memory",
                f"{options.size} does not fit in the memory that the run may take; choose a smaller size",
            )
        traceback.print_exc()  # to the runner, which keeps the end of it
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


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
    """Bound what the run may take: on a GPU through torch's allocator, on the CPU through the system (Linux; macOS does not enforce it)."""
    if device.kind != "cpu":
        import torch

        free, total = torch.cuda.mem_get_info(device.name)
        torch.cuda.set_per_process_memory_fraction(fraction * free / total, device.name)
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(fraction * free_memory())
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
