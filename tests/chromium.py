"""Which Chromium the browser tests and the benchmark drive: the distribution's, else the one that Playwright downloaded."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

_COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MISSING = (
    "No Chromium found. Install it with `apt-get install chromium` (Debian, Ubuntu: chromium-browser) or with "
    "`.venv/bin/python -m playwright install chromium`, then run `make test` again."
)


class NoChromium(Exception):
    """No Chromium on this machine; the message says how to get one."""


@cache
def chromium_path() -> str:
    """The path of a Chromium that can be started. Raises NoChromium with one line that says what to install."""
    for command in _COMMANDS:
        found = shutil.which(command)
        if found:
            return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        downloaded = playwright.chromium.executable_path
    if not Path(downloaded).exists():
        raise NoChromium(_MISSING)
    return downloaded
