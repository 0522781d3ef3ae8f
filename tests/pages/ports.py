"""A port of this machine for a server, and when that server answers."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
import urllib.request
from pathlib import Path


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until_healthy(url: str, process: subprocess.Popen[bytes], log: Path | None = None, seconds: float = 60) -> None:
    """Wait until a Streamlit server answers. RuntimeError when it ends first, TimeoutError when it takes too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the app ended at once:\n{log.read_text() if log else ''}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/_stcore/health", timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"the app did not answer in {seconds:g} s:\n{log.read_text() if log else ''}")
