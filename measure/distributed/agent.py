"""The process that starts the ranks and watches them: torchrun itself, told where no one else listens.

`python -m measure.distributed.agent RANKS FOLDER MODULE-OR-FILE ARGUMENT`, started by measure.distributed.launch and by nothing else.
The ranks find each other through files in FOLDER, so that no port is opened for it. It tells of ranks that fail, and dies with
whoever started it, as the ranks do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path


def main(argv: list[str]) -> int:
    """Run the ranks to the end: 0 when all ended well, 1 when one did not, `ended` (rank, code) having been told of each such."""
    ranks, folder, what, argument = argv
    threading.Thread(target=_die_with_parent, daemon=True).start()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    place = Path(folder)
    flags = {
        "nnodes": "1",
        "nproc-per-node": ranks,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": str(place / "rendezvous"),
        "rdzv-conf": "store_type=file",
        "rdzv-id": place.name,
        "local-addr": "localhost",
        "max-restarts": "0",
        "log-dir": str(place / "logs"),
    }
    module = () if what.endswith(".py") else ("--module",)
    # ranks inherit this process's standard output and input: the pipe that they tell into, and the one whose end is theirs
    try:
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        run(parse_args([*arguments, *module, what, argument]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            print(json.dumps({"event": "ended", "rank": rank, "code": failure.exitcode}), flush=True)
        return 1
    return 0


def _die_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)  # not its group: that is the group of whoever started it


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # taking torch down in order would take another second
