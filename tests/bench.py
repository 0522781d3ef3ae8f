"""`make bench`: speed and size against their targets, as medians and ratios of one run. Nothing here can fail a build."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser
from pydantic import BaseModel

from calc.catalogue import load
from calc.commands import COMMANDS, Command
from calc.errors import validated
from calc.hardware import Gpu, gpu
from calc.model.spec import ModelSpec
from tests.pages.server import chromium, open_page, serve, settled, user_environment

MODEL, DEVICE = "deepseek-v3", "h100-sxm-80gb"
# command, what its plan says, the field that moves from one estimate to the next (as a slider does), target in seconds
ESTIMATES = (
    ("params", {}, "lora_rank", 1e-3),
    ("train", {}, "seq", 1e-3),
    ("train", {"dp": 64, "pp": 16, "ep": 64, "zero": 1, "global_batch": 2048}, "seq", 1e-2),
    ("serve", {}, "context", 1e-3),
    ("compute", {}, "seq", 1e-3),
    ("pipeline", {"stages": 8}, "microbatches", 1e-3),
)
PAGES = ("", "parameters", "training", "kv_cache", "compute", "pipeline", "measure")


_BARS = "[...document.querySelectorAll('svg .mark-rect path')].map(path => path.getAttribute('d')).join()"


class Timing(NamedTuple):
    """Seconds (or bytes) of several tries of one thing, and what they should stay under."""

    name: str
    values: list[float]
    target: float
    unit: float = 1e-3
    suffix: str = "ms"

    def line(self) -> str:
        middle = statistics.median(self.values)
        low, high = min(self.values), max(self.values)
        shown = [f"{value / self.unit:9.2f}" for value in (middle, low, high, self.target)]
        verdict = "met" if middle < self.target else "MISSED"
        return f"{self.name:<52}{shown[0]}{shown[1]}{shown[2]}{shown[3]} {self.suffix:<4}{middle / self.target:7.2f}  {verdict}"


def _times(action: Callable[[], object], tries: int) -> list[float]:
    values = []
    for _ in range(tries):
        start = time.perf_counter()
        action()
        values.append(time.perf_counter() - start)
    return values


def estimates() -> list[Timing]:
    """One estimate of each kind in this process, each of another plan, after a first that makes the model's tables."""
    spec, device = load(MODEL), gpu(DEVICE)
    timings = []
    for name, said, moved, target in ESTIMATES:
        command = COMMANDS[name]
        start = 8 if moved in ("lora_rank", "microbatches") else 1024
        plans = iter([validated(command.plan, said | {moved: start + at}) for at in range(51)])
        ask = partial(_ask, command, plans, spec, device)
        ask()
        words = " ".join(f"{key}={value}" for key, value in said.items())
        timings.append(Timing(f"{name} {MODEL} {words}".strip(), _times(ask, 50), target))
    return timings


def _ask(command: Command, plans: Iterator[BaseModel], spec: ModelSpec, device: Gpu) -> None:
    command.answer(next(plans), spec, device)


COLD = (("params", 0.32), ("train", 0.45))  # command, target in seconds


def _run(command: list[str]) -> str:
    """What a new process prints; compiled modules are kept and used, as they are for a user."""
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=user_environment())
    return done.stdout


def cold() -> Iterator[Timing]:
    """The command line from a new process to its answer."""
    for name, target in COLD:
        command = [sys.executable, "-m", "calc", name, "llama-2-7b"]
        spent = _times(lambda command=command: _run(command), 8)
        yield Timing(f"python -m calc {name}, cold", spent[1:], target)  # the first may compile


TRACES = (
    ("llama-2-7b", 8.0, 1.5),
    ("deepseek-v3", 15.0, 15.0),
)  # model, targets in seconds: a new process, and once more
_TWICE = """
import sys, time
from calc.catalogue import load_config
from measure.trace import TraceOptions, trace_step
for _ in range(2):
    start = time.perf_counter()
    trace_step(load_config(sys.argv[1]), TraceOptions())
print(time.perf_counter() - start)
"""


def traces() -> Iterator[Timing]:
    """A traced step at 4,096 tokens: as a command, and a second time in one process."""
    for model, cold_target, warm_target in TRACES:
        command = [sys.executable, "-m", "measure", "trace", model]
        spent = _times(lambda command=command: _run(command), 2)
        yield Timing(f"python -m measure trace {model}, cold", spent, cold_target, 1.0, "s")
        again = float(_run([sys.executable, "-c", _TWICE, model]))
        yield Timing(f"trace {model}, warm", [again], warm_target, 1.0, "s")


EMPTY = "import streamlit as st\nst.set_page_config('Empty')\nst.title('Empty')\n"


def _first_page(browser: Browser, script: Path | None) -> float:
    """Seconds from the start of a server to its first page drawn; it is asked once it is healthy."""
    start = time.perf_counter()
    with serve(script) as server:
        page = browser.new_page()
        open_page(page, server.url)
        spent = time.perf_counter() - start
        page.close()
    return spent


def web() -> list[Timing]:
    """The app in Chromium: its start, a slider's move, and the memory of its process after every page."""
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        (empty := Path(folder) / "empty.py").write_text(EMPTY)
        pairs = [(_first_page(browser, None), _first_page(browser, empty)) for _ in range(4)][1:]
        first, moves = [ours for ours, _ in pairs], []
        with serve() as server:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            for name in PAGES:
                open_page(page, f"{server.url}/{name}")
            resident = float(server.rss_bytes())
            open_page(page, f"{server.url}/training")
            thumb = page.get_by_role("slider").first
            thumb.focus()
            for at in range(12):
                drawn = page.evaluate(_BARS)
                start = time.perf_counter()
                page.keyboard.press("ArrowRight" if at % 2 == 0 else "ArrowLeft")
                page.wait_for_function(f"old => {_BARS} !== old", arg=drawn, polling=5)
                moves.append(time.perf_counter() - start)
                settled(page)
    return [
        Timing("web process from start to first page drawn", first, 3.0),
        Timing("  over that of an empty Streamlit page", [ours / bare for ours, bare in pairs], 1.5, 1.0, "x"),
        Timing("slider move to redrawn training chart", moves[2:], 0.3),
        Timing("memory of the web process after every page", [resident], 300 * 2**20, 2**20, "MiB"),
    ]


def main() -> None:
    print(f"{'':<52}{'median':>9}{'least':>9}{'most':>9}{'target':>9}      {'ratio':>6}")
    for timing in estimates():
        print(timing.line(), flush=True)
    for timing in chain(cold(), traces(), web()):
        print(timing.line(), flush=True)


if __name__ == "__main__":
    main()
