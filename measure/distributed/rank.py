"""One rank: `python -m measure.distributed.rank ORDER-AS-JSON`, started by torchrun for measure.distributed.launch.

It dies with whoever started it all: its standard input is a pipe from there.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

from calc.errors import InputError
from calc.measurements.records import Measured
from measure.child import Tell, die_with_parent, teller
from measure.distributed import JOBS
from measure.distributed.order import FOLDER, Order

_LONGEST = 3700  # seconds; measure.runner ends a run long before


def main(argv: list[str]) -> int:
    """Run the order's jobs with the other ranks, rank 0 telling as JSON lines: `progress`, `row`; any rank: `failed` or `refused`."""
    order = Order.from_json(argv[0])
    tell = teller()
    threading.Thread(target=die_with_parent, args=(partial(_sweep, Path(order.store)),), daemon=True).start()
    faulthandler.dump_traceback_later(_LONGEST, exit=True)
    try:
        for row in measured(order, tell):
            tell("row", **row._asdict())
    except InputError as error:
        tell("refused", message=str(error))
    except Exception as error:
        traceback.print_exc()
        kind = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
        tell("failed", message=f"rank {os.environ['RANK']}: {kind}: {' '.join(str(error).split())[:300]}")
    else:
        return 0
    return 1


def measured(order: Order, tell: Tell) -> Iterator[Measured]:
    """Every job's rows, on rank 0; on the others the same work, and no rows."""
    from measure.distributed.group import joined

    _guard_memory(order)
    first = os.environ["RANK"] == "0"
    done = 0

    def progress(fraction: float, message: str) -> None:
        if first:
            tell("progress", fraction=(done + fraction) / len(order.jobs), message=message)

    with joined(order.kind, order.store, progress) as group:
        for done, name in enumerate(order.jobs):  # noqa: B007 - progress reads it
            for row in import_module(JOBS[name].module).run(group, order.size):
                if first:
                    yield row


def _sweep(store: Path) -> None:
    """Take away the folder of the run, which is left to the ranks when all those above them are killed."""
    if store.is_absolute() and store.parent.name.startswith(FOLDER):
        shutil.rmtree(store.parent, ignore_errors=True)


def _guard_memory(order: Order) -> None:
    """Bound what this rank may take: its share of what the run may, on the CPU; the run's share of its own card, on a GPU."""
    if order.kind != "cpu":
        import torch

        torch.cuda.set_per_process_memory_fraction(order.memory_fraction, int(os.environ["LOCAL_RANK"]))
        return
    import resource

    limit, most = resource.getrlimit(resource.RLIMIT_DATA)
    if limit != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_DATA, (limit // int(os.environ["LOCAL_WORLD_SIZE"]), most))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # at once: a group that lost a rank may hang when it is taken down in order
