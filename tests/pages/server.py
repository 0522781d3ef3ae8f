"""The app as its own process on a free port of this machine, and a Chromium to open it with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.chromium import chromium_path
from tests.pages.ports import free_port, until_healthy

ROOT = Path(__file__).parents[2]
_FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-dev-shm-usage""".split()
PATIENCE = 60_000  # milliseconds that a page may take on a busy machine before a test gives up


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


def user_environment() -> dict[str, str]:
    """This process's environment as a user has it: compiled modules are kept."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@contextlib.contextmanager
def serve(script: Path | None = None) -> Iterator[Server]:
    """Start the app, or another `script`, and wait until it answers; end it afterwards, with all that it started."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as out:
            command = [sys.executable, "-m", "streamlit", "run", str(script or "app.py"), "--server.port", str(port)]
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=user_environment()
            )
        try:
            server = Server(f"http://localhost:{port}", process.pid, log)
            until_healthy(server.url, process, log)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium: the system's, else Playwright's."""
    path = chromium_path()  # before Playwright runs here: it takes no second instance in a thread
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


_SETTLED = """() => document.querySelector('[data-testid="stApp"]')?.dataset.testScriptState === "notRunning"
    && !document.querySelector('[data-testid="stSkeleton"]')"""


def settled(page: Page) -> None:
    """Wait until the app has drawn all of the page and rests."""
    page.wait_for_function(_SETTLED, timeout=PATIENCE)


_WATCH = """() => {
    const app = document.querySelector('[data-testid="stApp"]');
    window.redrawBegan = false;
    const observer = new MutationObserver(() => {
        if (app.dataset.testScriptState === "notRunning") return;
        window.redrawBegan = true;
        observer.disconnect();
    });
    observer.observe(app, { attributes: true, attributeFilter: ["data-test-script-state"] });
}"""


@contextlib.contextmanager
def redrawn(page: Page) -> Iterator[None]:
    """Around what makes the app draw anew: wait until it has begun to, then until it rests."""
    page.evaluate(_WATCH)
    yield
    page.wait_for_function("() => window.redrawBegan", timeout=PATIENCE)
    settled(page)


def open_page(page: Page, url: str) -> None:
    """Open a page and wait until the app has drawn it."""
    page.set_default_timeout(PATIENCE)
    page.goto(url)
    page.wait_for_selector("h1", timeout=PATIENCE)
    settled(page)


_STILL = """async (part) => {
    await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
    await Promise.all(part.getAnimations().map((animation) => animation.finished.catch(() => null)));
}"""


def unfold(folded: Locator) -> None:
    """Open a folded part and wait until it rests: what lies in a part that is still moving slips away under a click."""
    folded.click()
    folded.locator("xpath=ancestor::details[@open]").evaluate(_STILL)


def open_tab(page: Page, name: str) -> None:
    """Open a tab of the page and wait until it is drawn."""
    tab = page.get_by_role("tab", name=name, exact=True)
    tab.click()
    expect(tab).to_have_attribute("aria-selected", "true")
    settled(page)
