"""A trace told as it goes: an event a line on standard output, one trace at a time on this machine, and an end when asked for."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from calc.errors import InputError
from measure.device_queue import Ticket
from measure.trace.child import Stopped

_POLL_SECONDS = 0.2
_PLACE = "trace"  # the queue's name: a trace takes a processor, not the GPU
# how far a trace is when it says so: the beginning of what it says, and the share of the whole that lies behind it
_STEPS = (("building", 0.4), ("running two steps", 0.6), ("running every layer", 0.7))

Told = Callable[[str], None]
Ending = Callable[[], bool]


def tell(work: Callable[[Told, Ending], Mapping[str, Any]], seconds: float, attached: bool) -> str:
    """Print the events of a trace: `queued` (device, ahead), `started` (device, seconds), `progress` (fraction, message),
    `answer` (answer), and last `done` (outcome: "finished", "cancelled" or "refused", message).

    `work(told, stopped)` makes the answer; it raises Stopped soon after `stopped()` turns true: by a signal or, when `attached`,
    by the end of standard input. SystemExit 1 when it was cancelled, InputError when it was refused.
    """
    stop = _stopped_by_signals()
    if attached:
        threading.Thread(target=_stop_at_end_of_input, args=(stop,), daemon=True).start()
    try:
        with Ticket(_PLACE, {"workload": "another trace", "process": os.getpid()}) as ticket:
            _wait(ticket, stop)
            _say("started", device="this processor", seconds=seconds)
            _say("answer", answer=work(_progress, stop.is_set))
    except Stopped:
        _say("done", outcome="cancelled", message="cancelled")
        raise SystemExit(1) from None
    except InputError as error:
        _say("done", outcome="refused", message=str(error))
        raise
    _say("done", outcome="finished", message="")
    return ""


def _wait(ticket: Ticket, stop: threading.Event) -> None:
    """Wait for the traces that came before."""
    known: list[dict[str, Any]] = []
    while ahead := ticket.ahead():
        if ahead != known:
            _say("queued", device="this processor", ahead=ahead)
            known = ahead
        if stop.wait(_POLL_SECONDS):
            raise Stopped


def _progress(text: str) -> None:
    fraction = next((share for start, share in _STEPS if text.startswith(start)), None)
    if fraction is not None:
        _say("progress", fraction=fraction, message=text, seconds_left=None)


def _say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def _stopped_by_signals() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _stop_at_end_of_input(stop: threading.Event) -> None:
    while os.read(sys.__stdin__.fileno() if sys.__stdin__ else 0, 4096):
        pass
    stop.set()
