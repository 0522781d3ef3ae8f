"""`python -m measure devices`: what can be measured on here, what cannot and why, and who is at it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from calc.command_line.flags import Parser
from measure.commands.tables import add_format, checked_format, table
from measure.device_queue import queue
from measure.devices import devices, lock_name, why_no_gpu, why_no_triton

_COLUMNS = ("name", "kind", "title", "memory_bytes", "catalogue", "running", "waiting")


def main(argv: Sequence[str]) -> str:
    """The devices as text; JSON has `devices` and `notes`. InputError when torch is not there."""
    parser = Parser(
        prog="python -m measure devices", description="What can be measured here, or why not.", allow_abbrev=False
    )
    add_format(parser)
    form = checked_format(parser.parse_args(argv).format)
    rows = [_row(device.as_json()) for device in devices()]
    notes = [note for note in (why_no_gpu(), why_no_triton()) if note]
    if form == "json":
        return json.dumps({"devices": rows, "notes": notes}, indent=1)
    text = table(rows, _COLUMNS, form)
    return text if form == "csv" else "\n".join([text, *(f"\n{note}" for note in notes)])


def _row(device: dict[str, Any]) -> dict[str, Any]:
    runs = queue(lock_name(device["name"]))
    return device | {"running": runs[0]["workload"] if runs else "", "waiting": len(runs[1:]), "queue": runs}
