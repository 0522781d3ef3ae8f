"""The child process of a trace: a request as JSON on standard input, the answer as JSON on standard output."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import fields
from typing import Any

from calc.errors import InputError
from measure.trace import TraceOptions, trace_step


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The observed bytes, or `error` and `field` when what was asked cannot be built or run."""
    asked = request["options"]
    asked["lora_targets"] = tuple(asked["lora_targets"])
    options = TraceOptions(**{each.name: asked[each.name] for each in fields(TraceOptions)})
    try:
        return trace_step(request["config"], options, progress).as_dict()
    except InputError as error:
        return {"error": str(error), "field": error.field}


def progress(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.__stderr__, flush=True)


def _end_with_parent() -> None:
    """End when the process that asked is gone: nothing is left running."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps(answer(json.load(sys.stdin))))
