"""Ranks that behave as a test asks, and a process that starts them.

`python ranks_misbehaving.py ORDER` stands for `python -m measure.distributed.rank ORDER`, the order's job naming a behaviour;
`python ranks_misbehaving.py parent BEHAVIOUR` starts two such ranks and prints their rows.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from calc.errors import InputError
from calc.measurements.records import Measured
from measure.distributed import rank
from measure.distributed.launch import launched
from measure.distributed.order import Order

RANK = int(os.environ.get("RANK", "0"))


def row(quantity, value):
    return Measured("a test", quantity, None, value, "")


def hang(order):
    """Each rank leaves a file that names its process, then waits for ever, deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = Path(os.environ["PIDS"])
    (folder / f"{os.getpid()}").touch()
    (folder / f"{os.getppid()}").touch()
    while len(list(folder.iterdir())) < 3:
        time.sleep(0.02)
    yield row("there", 1)
    time.sleep(1000)


def all_have_said(order):
    """Wait until both ranks' rows are sent: torchrun ends a rank that is slower than one that fails."""
    folder = Path(order.store).parent
    (folder / f"said.{RANK}").touch()
    while len(list(folder.glob("said.*"))) < 2:
        time.sleep(0.02)


def killed(order):
    yield row("before", 1)
    all_have_said(order)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def raises(order):
    yield row("before", 1)
    all_have_said(order)
    if RANK == 1:
        raise RuntimeError("the first line\nthe second")
    time.sleep(1000)


def refuses(order):
    raise InputError("size: this is refused", "size")
    yield


def exits(order):
    if RANK == 1:
        os._exit(3)
    time.sleep(1000)
    yield


def crowd(order):
    raise MemoryError
    yield


def addresses(order):
    """Joins a real group; how many TCP sockets rank 0 and its agent have, and how many of them are not on the loopback interface."""
    import torch
    from torch import distributed

    from measure.distributed.group import joined

    with joined(order.kind, order.store, lambda fraction, message: None):
        distributed.all_reduce(torch.ones(10))
        found = [*_local_addresses("self"), *_local_addresses(str(os.getppid()))]
        distributed.barrier()
    loopback = ("0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F")
    yield row("sockets", len(found))
    yield row("elsewhere", sum(address not in loopback for address in found))


def _local_addresses(process):
    links = (os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink())
    mine = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in mine:
                yield fields[1].split(":")[0]


BEHAVIOURS = {each.__name__: each for each in (hang, killed, raises, refuses, exits, crowd, addresses)}


def behave(name, on_row=lambda found: None):
    """The rows of two ranks that behave so."""
    found = []
    for each in launched(Order((name,), "cpu", "small"), 2, lambda fraction, message: None, __file__):
        found.append(each)
        on_row(each)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "parent":
        behave(sys.argv[2], lambda found: print(found.quantity, flush=True))
        sys.exit(0)
    rank.measured = lambda order, tell: (found for found in BEHAVIOURS[order.jobs[0]](order) if RANK == 0)
    code = rank.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
