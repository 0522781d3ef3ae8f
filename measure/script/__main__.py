"""The child process of a script's trace: a request as JSON on standard input, the answer as JSON on what was standard output."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

from calc.errors import InputError
from calc.hardware import chosen_gpu

_POLL_SECONDS = 0.5


def main() -> None:
    """Answer one request. Prints of the program go to standard error."""
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_DATA, (request["memory_bytes"],) * 2)
    threading.Thread(target=_end_with, args=(request["parent"],), daemon=True).start()
    json.dump(_answer(request), answers)
    answers.flush()
    answers.close()
    os._exit(0)  # whatever threads the program has left


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    gpu = chosen_gpu(*request["gpu"])
    try:
        from measure.script.program import trace_program

        return trace_program(request["script"], request["args"], gpu, request["steps"], request["ranks"])
    except InputError as error:
        return {"error": str(error), "field": error.field}
    except MemoryError:
        return {
            "error": "--script: the program took more memory than --memory-gib allows on the host",
            "field": "--memory-gib",
        }


def _end_with(parent: int) -> None:
    """End this process and all that it started when the one that asked is gone."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
