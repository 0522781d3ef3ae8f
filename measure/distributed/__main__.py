"""`torchrun [rendezvous flags] -m measure.distributed NAME`: one rank of a run that torchrun starts, on one machine or on many.

Rank 0 saves the rows on its machine and prints them; the others work and stay silent.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack

from calc.command_line.exit_codes import guarded
from calc.command_line.flags import Parser
from calc.errors import InputError
from calc.measurements.records import Records
from measure.commands.tables import add_format, checked_format, results
from measure.device_queue import Ticket
from measure.devices import Device, lock_name, resolve
from measure.distributed import JOBS
from measure.distributed.order import Order
from measure.distributed.rank import measured
from measure.setting import SIZES

_SIZES_TEXT = ", ".join(SIZES)
_POLL_SECONDS = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """This rank's part; prints the rows on rank 0. Returns the exit code: 0 measured, 2 bad input, 1 our own mistake."""
    return guarded(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> None:
    given = _parser().parse_args(argv)
    form = checked_format(given.format)
    if given.name not in JOBS:
        raise InputError.of("NAME", given.name, f"it must be one of {', '.join(JOBS)}")
    if given.size not in SIZES:
        raise InputError.of("--size", given.size, f"it must be one of {_SIZES_TEXT}")
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        raise InputError(
            f"measure.distributed is started by torchrun: torchrun --nproc-per-node 2 -m measure.distributed {given.name}; "
            f"python -m measure run {given.name} --ranks 2 starts it on this machine by itself"
        )
    with ExitStack() as held:
        device = _device(given.device, held, given.name)
        _report(Order((given.name,), device.kind, given.size), device, form)


def _parser() -> Parser:
    parser = Parser(
        prog="torchrun -m measure.distributed", description="Measure on several devices.", allow_abbrev=False
    )
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(JOBS)}")
    parser.add_argument("--size", default="small", metavar="SIZE", help=f"one of {_SIZES_TEXT} (default: small)")
    parser.add_argument("--device", default="auto", metavar="auto|cuda|cpu", help="what the ranks use (default: auto)")
    add_format(parser)
    return parser


def _device(wanted: str, held: ExitStack, name: str) -> Device:
    """This rank's device, ours alone until the end: each rank takes its own GPU, the first one of a machine the CPU for all there."""
    if wanted not in ("auto", "cuda", "cpu"):
        raise InputError.of("--device", wanted, "it must be auto, cuda or cpu: each rank takes the GPU of its number")
    local = int(os.environ["LOCAL_RANK"])
    found = resolve(wanted)
    if found.kind != "cpu":
        found = resolve(f"cuda:{local}")
    if found.kind != "cpu" or local == 0:
        about = {"workload": name, "process": os.getpid(), "since": time.time()}
        ticket = held.enter_context(Ticket(lock_name(found.name), about))
        while ticket.ahead():
            time.sleep(_POLL_SECONDS)
    return found


def _report(order: Order, device: Device, form: str) -> None:
    from measure.environment import environment

    if os.environ["RANK"] != "0":
        for _ in measured(order, lambda event, **values: None):
            pass
        return
    records, run, about, rows = Records(), uuid.uuid4().hex, environment(device), []
    options = {"workload": order.jobs[0], "size": order.size, "ranks": int(os.environ["WORLD_SIZE"])}
    records.begin(run, order.jobs[0], options, about)
    outcome, message = "failed", "a rank failed, or was stopped; finished rows are kept"
    try:
        for row in measured(order, _show):
            records.add(run, row)
            rows.append(row.as_json(order.jobs[0], about) | {"run": run, "started": about["time"]})
        outcome, message = "finished", ""
    finally:
        records.end(run, outcome, message)
    print(results(rows, form), flush=True)


def _show(event: str, fraction: float = 0.0, message: str = "") -> None:
    print(f"{fraction:4.0%} {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
