"""`python -m measure run NAME`: measure now. Rows go to standard output, progress to standard error."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from calc.catalogue import load_config
from calc.command_line.flags import Parser
from calc.commands import flag
from calc.errors import InputError, validated
from calc.model.config import from_config
from calc.units import show_seconds
from measure.commands.tables import add_format, checked_format, results
from measure.devices import surely_no_gpu
from measure.run_options import RunOptions
from measure.runner import Event, run
from measure.workloads import SUITES, WORKLOADS

_LINES = "jsonl"  # every event as a line, as it comes: what the page reads


def main(argv: Sequence[str]) -> str:
    """The rows as text. InputError on bad input; SystemExit 1, the rows printed, when the run did not finish."""
    given = vars(_parser().parse_args(argv))
    form = checked_format(given["format"], (_LINES,))
    fields = {name: given[name] for name in RunOptions.model_fields if name in given}
    options = validated(RunOptions, fields, lambda name: "NAME" if name == "workload" else flag(name))
    _refuse_early(options)
    cancel = _cancelled_by_signals()
    if given["attached"]:
        threading.Thread(target=_cancel_at_end_of_input, args=(cancel,), daemon=True).start()
    rows: list[Event] = []
    done: Event = {}
    for event in run(options, cancel):
        if form == _LINES:
            print(json.dumps(event), flush=True)
        elif event["event"] != "part" or options.workload in SUITES:  # how a single one ended is told at the end
            _show(event)
        if event["event"] == "row":
            rows.append({key: value for key, value in event.items() if key != "event"})
        done = event
    return _ended(done, "" if form == _LINES else results(rows, form))


def _refuse_early(options: RunOptions) -> None:
    """InputError for what can be seen to be wrong before a process starts and imports torch: the model, the device."""
    if options.model:
        from_config(load_config(options.model))
    reason = surely_no_gpu()
    if reason and options.device.startswith("cuda"):
        raise InputError.of("--device", options.device, f"this machine has cpu; {reason}")
    if (reason or options.device == "cpu") and all(WORKLOADS[name].needs_gpu for name in options.workloads):
        raise InputError(
            f"{options.workload}: not measurable here: it needs a GPU; {reason or '--device cpu was chosen'}"
        )


def _parser() -> Parser:
    parser = Parser(prog="python -m measure run", description="Measure a workload.", allow_abbrev=False)
    parser.add_argument("workload", metavar="NAME", help="a workload (python -m measure list)")
    for name, field in RunOptions.model_fields.items():
        if name != "workload":
            kind: Any = float if isinstance(field.default, float) else str
            text = f"{field.description} (default: {field.default})"
            parser.add_argument(flag(name), type=kind, default=field.default, metavar=name.upper(), help=text)
    parser.add_argument("--attached", action="store_true", help="stop when standard input ends, as the page does")
    add_format(parser, (_LINES,))
    return parser


def _cancelled_by_signals() -> threading.Event:
    """An event that Ctrl-C, a closed terminal or `kill` sets: the run then ends in order, its process with it."""
    cancel = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: cancel.set())
    return cancel


def _cancel_at_end_of_input(cancel: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    cancel.set()


def _show(event: Event) -> None:
    """One line of progress on standard error."""
    kind = event["event"]
    if kind == "queued":
        first = event["ahead"][0]
        text = f"waiting for {event['device']}: {first['workload']} (process {first['process']}) has it, {len(event['ahead'])} ahead"
    elif kind == "started":
        text = f"on {event['device']}, at most {event['seconds']:g} s"
    elif kind == "ready":
        text = f"{event['workload']} on {event['environment']['device']}"
    elif kind == "progress":
        text = f"{event['fraction']:4.0%} {event['message']}, about {show_seconds(event['seconds_left'])} left"
    elif kind == "part" and event["outcome"] != "finished":
        text = f"{event['workload']}: {event['outcome']}: {event['message']}"
    else:
        return
    print(text, file=sys.stderr, flush=True)


def _ended(done: Event, text: str) -> str:
    """What to print at the end. A refusal is bad input; any other early end is exit status 1."""
    if done["outcome"] == "finished":
        return text
    if text and done["rows"]:
        print(text)  # a disk that filled may have kept the last of them out of the store
    if done["outcome"] == "refused":
        raise InputError(done["message"])
    print(f"{done['outcome']}: {done['message']}", file=sys.stderr)
    raise SystemExit(1)
