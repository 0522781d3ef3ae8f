"""`make bench`: speed and size against their targets, as medians and ratios of one run. Nothing here can fail a build."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from pydantic import BaseModel

from calc.catalogue import load
from calc.commands import COMMANDS, Command
from calc.errors import validated
from calc.hardware import Gpu, gpu
from calc.model.spec import ModelSpec
from tests.pages.server import chromium, open_page, serve, settled

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


def cold() -> Timing:
    """The command line from a new process to its answer."""
    command = [sys.executable, "-m", "calc", "params", "llama-2-7b"]
    return Timing(
        "python -m calc params, cold", _times(lambda: subprocess.run(command, check=True, capture_output=True), 7), 0.4
    )


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
        spent = _times(lambda command=command: subprocess.run(command, check=True, capture_output=True), 2)
        yield Timing(f"python -m measure trace {model}, cold", spent, cold_target, 1.0, "s")
        again = subprocess.run([sys.executable, "-c", _TWICE, model], check=True, capture_output=True, text=True)
        yield Timing(f"trace {model}, warm", [float(again.stdout)], warm_target, 1.0, "s")


def web() -> list[Timing]:
    """The app in Chromium: its start, a slider's move, and the memory of its process after every page."""
    with chromium() as browser:
        first, moves = [], []
        for _ in range(3):
            start = time.perf_counter()
            with serve(wait=False) as server:
                page = browser.new_page()
                _until_served(page, server.url)
                first.append(time.perf_counter() - start)
                page.close()
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
        Timing("slider move to redrawn training chart", moves[2:], 0.3),
        Timing("memory of the web process after every page", [resident], 300 * 2**20, 2**20, "MiB"),
    ]


def _until_served(page: object, url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            return open_page(page, url)  # type: ignore[arg-type]
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def main() -> None:
    print(f"{'':<52}{'median':>9}{'least':>9}{'most':>9}{'target':>9}      {'ratio':>6}")
    for timing in estimates():
        print(timing.line(), flush=True)
    print(cold().line(), flush=True)
    for timing in traces():
        print(timing.line(), flush=True)
    for timing in web():
        print(timing.line(), flush=True)


if __name__ == "__main__":
    main()
