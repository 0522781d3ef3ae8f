"""The app as its own process on a free port of this machine, and a Chromium to open it with."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, sync_playwright

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "chromium")
_FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-dev-shm-usage""".split()
PATIENCE = 20_000  # milliseconds that a page may take on a busy machine before a test gives up


@dataclass(frozen=True, slots=True)
class Server:
    """A running app: its address, its process, and the file that holds what it printed."""

    url: str
    pid: int
    log: Path

    def rss_bytes(self) -> int:
        """Memory of the process, as Linux counts it."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def maps(self) -> str:
        """What the process has mapped: a shared library that was imported is listed."""
        return Path(f"/proc/{self.pid}/maps").read_text()


@contextlib.contextmanager
def serve(wait: bool = True) -> Iterator[Server]:
    """Start the app and, unless `wait` is False, wait until it answers; end it afterwards, with all that it started."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as out:
            command = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.port", str(port)]
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            server = Server(f"http://localhost:{port}", process.pid, log)
            if wait:
                _await(server, process)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await(server: Server, process: subprocess.Popen[bytes], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the app ended at once:\n{server.log.read_text()}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/_stcore/health", timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"the app did not answer in {seconds:g} s:\n{server.log.read_text()}")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium of the distribution."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


_SETTLED = """() => document.querySelector('[data-testid="stApp"]')?.dataset.testScriptState === "notRunning"
    && !document.querySelector('[data-testid="stSkeleton"]')"""


def settled(page: Page) -> None:
    """Wait until the app has drawn all of the page and rests."""
    page.wait_for_function(_SETTLED, timeout=PATIENCE)


def open_page(page: Page, url: str) -> None:
    """Open a page and wait until the app has drawn it."""
    page.set_default_timeout(PATIENCE)
    page.goto(url)
    page.wait_for_selector("h1", timeout=PATIENCE)
    settled(page)


_STILL = """async (part) => {
    await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
    await Promise.all(part.getAnimations().map((animation) => animation.finished));
}"""


def unfold(folded: Locator) -> None:
    """Open a folded part and wait until it rests: what lies in a part that is still moving slips away under a click."""
    folded.click()
    folded.locator("xpath=ancestor::details[@open]").evaluate(_STILL)
