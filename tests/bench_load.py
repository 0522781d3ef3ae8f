"""`make bench-load`: many people at one server, on loopback alone and for a bounded time. Nothing here can fail a build.

Twenty sessions, then fifty, each type a new sequence length every second; the server may open 256 files. `--seconds`, `--people`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

from tests.pages.client import session
from tests.pages.server import Server, serve

_FILES = 256
_PAUSE = 1.0  # seconds between two moves of one person


class Figures:
    """What was seen: seconds of each redraw and of each answer of /_stcore/health, and what went wrong."""

    def __init__(self) -> None:
        self.redraws: list[float] = []
        self.health: list[float] = []
        self.lost: list[str] = []


def _person(url: str, number: int, end: float, seen: Figures) -> None:
    try:
        with session(url) as client:
            client.redraw(page="training")
            label = next(name for kind, name in client.widgets if kind == "text_input" and "equence" in name)
            move = 0
            while time.monotonic() < end:
                start = time.monotonic()
                client.put(label, str(1024 + 64 * (move % 50) + number))
                seen.redraws.append(time.monotonic() - start)
                move += 1
                time.sleep(_PAUSE)
    except Exception as error:
        seen.lost.append(f"{type(error).__name__}: {str(error)[:100]}")


def _health(url: str, end: float, seen: Figures) -> None:
    while time.monotonic() < end:
        start = time.monotonic()
        try:
            urllib.request.urlopen(f"{url}/_stcore/health", timeout=30).read()
            seen.health.append(time.monotonic() - start)
        except OSError as error:
            seen.lost.append(f"health: {error}")
        time.sleep(0.2)


def load(url: str, people: int, seconds: float) -> Figures:
    """So many sessions at once for so long."""
    seen, end = Figures(), time.monotonic() + seconds
    threads = [threading.Thread(target=_person, args=(url, at, end, seen), daemon=True) for at in range(people)]
    threads.append(threading.Thread(target=_health, args=(url, end, seen), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 120)
    return seen


@contextlib.contextmanager
def _few_files() -> Iterator[Server]:
    """A server that may open _FILES files; this process gets its own limit back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_FILES, hard), hard))
    with serve() as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        yield server


def main() -> int:
    parser = argparse.ArgumentParser(description="Many sessions at one server, on this machine alone.")
    parser.add_argument("--people", type=int, nargs="+", default=[20, 50])
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    with _few_files() as server:
        for people in given.people:
            seen = load(server.url, people, given.seconds)
            print(
                f"{people} sessions, {given.seconds:g} s: {len(seen.redraws)} redraws, median {_ms(seen.redraws, 50)}, 90 % within "
                f"{_ms(seen.redraws, 90)}; health median {_ms(seen.health, 50)}, slowest {_ms(seen.health, 100)}; lost "
                f"{len(seen.lost)}; {server.rss_bytes() / 2**20:.0f} MiB",
                flush=True,
            )
            for line in sorted(set(seen.lost))[:5]:
                print(f"  {line}")
    return 0


def _ms(values: list[float], percent: int) -> str:
    if not values:
        return "none"
    at = (
        statistics.median(values)
        if percent == 50
        else sorted(values)[min(len(values) * percent // 100, len(values) - 1)]
    )
    return f"{1000 * at:.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
