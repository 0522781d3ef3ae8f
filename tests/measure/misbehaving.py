"""A measuring process that behaves as a test asks, and a runner of it: no torch, so that each starts in a moment.

`python misbehaving.py BEHAVIOUR run NAME ...` stands for `python -m measure run NAME ...`, and
`python misbehaving.py BEHAVIOUR child OPTIONS` for the `python -m measure.child OPTIONS` that it starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from calc.command_line.exit_codes import guarded
from calc.errors import InputError
from calc.measurements.records import Measured, Records
from measure import child, environment, runner, workloads
from measure.commands import run as command
from measure.device_queue import queue
from measure.devices import Device

CPU = Device("cpu", "cpu", "a test's processor", 2**34)


def row(number):
    return Measured("a test", f"row/{number}", 512 * number, 512 * number, "bytes")


def three(setting):
    for number in range(1, 4):
        setting.tell(number / 3, f"row {number}")
        yield row(number)


def endless(setting):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in range(1, 10**6):
        yield row(number)
        time.sleep(0.02)


def hang(setting):
    yield from three(setting)
    time.sleep(1000)


def nap(setting):
    """Two rows; the first run of all waits between them until another one queues behind it."""
    yield row(1)
    while len(Records().runs()) == 1 and len(queue("cpu")) < 2:
        time.sleep(0.02)
    yield row(2)


def killed(setting):
    yield from three(setting)
    os.kill(os.getpid(), signal.SIGKILL)


def exits(setting):
    yield row(1)
    print("the driver said: no", file=sys.stderr, flush=True)
    os._exit(3)


def raises(setting):
    yield row(1)
    raise RuntimeError("the first line\nthe second")


def greedy(setting):
    yield row(1)
    hoard = [bytearray(64 * 2**20) for _ in range(1000)]  # refused long before a machine's memory is gone
    yield row(len(hoard))


def prints(setting):
    print("a library's greeting")
    os.system("echo a program's greeting")
    yield row(1)


def fills(setting):
    """Rows of 4 kB without end: a small disk is full soon."""
    for number in range(1, 10**6):
        yield row(number)._replace(case="x" * 4000)


def gated(setting):
    """Two rows; between them it says that the first was sent, and waits for a file named `go` in the folder of results."""
    yield row(1)
    setting.tell(0.5, "one row sent")
    while not Path(os.environ["PLUMBLINE_DATA"], "go").exists():
        time.sleep(0.05)
    yield row(2)


def parent(setting):
    """Starts a process of its own and waits for it."""
    grandchild = subprocess.Popen(["sleep", "1000"])
    yield Measured("a test", "process", None, grandchild.pid, "")
    grandchild.wait()


def floods(setting):
    while True:
        setting.tell(0.5, "again")
    yield row(1)


def refuses(setting):
    raise InputError("not measurable here: a test says so")
    yield


_ALL = (three, endless, hang, nap, killed, exits, raises, greedy, prints, fills, gated, parent, floods)
BEHAVIOURS = {each.__name__: each for each in _ALL}


def main(behaviour, mode, *rest):
    if mode == "run":
        command.run = partial(runner.run, command=(sys.executable, __file__, behaviour, "child"))
        return guarded(lambda: print(command.main(rest)))
    # all of a suite do well but for two
    odd = {"pcie": refuses, "flops": raises} if behaviour == "suite" else {"decoder-states": BEHAVIOURS[behaviour]}
    for name, workload in workloads.WORKLOADS.items():
        workloads.WORKLOADS[name] = replace(workload, run=odd.get(name, three))
    child.resolve = lambda wanted: CPU
    environment.environment = lambda device: {"device": device.title, "time": "2026-01-01T00:00:00+00:00"}
    return child.main(list(rest))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
