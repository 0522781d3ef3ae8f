"""One run at a time on a device, first come first served, across processes; who runs and who waits can be seen.

Each run holds a ticket: a file, locked with flock for as long as its process lives. The lowest live ticket has the device. A
killed process's lock goes with it, so a ticket that can be locked is stale and is thrown away.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from calc.errors import InputError
from calc.measurements.records import make_data_directory

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Ticket:
    """A place in the queue of one device, from entering `with` until it is left or the process ends.

    `about` is what others see of this run (a JSON object). InputError when the data folder cannot be written.
    """

    def __init__(self, device: str, about: Mapping[str, Any]) -> None:
        self._folder = _folder(device)
        self._about = json.dumps(dict(about)).encode()
        self._path = Path()
        self._file = -1

    def __enter__(self) -> Ticket:
        with _gate(self._folder):
            last = max((number for number, _ in _numbered(self._folder)), default=0)
            self._path = self._folder / f"{last + 1}.ticket"
            self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                _write(self._file, self._about)
            except OSError:  # a full disk: leave no place in the queue that says nothing
                self._path.unlink()
                os.close(self._file)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _gate(self._folder):
            self._path.unlink(missing_ok=True)
            os.close(self._file)

    def ahead(self) -> list[dict[str, Any]]:
        """Who is before us, the one that has the device first; [] when it is ours."""
        mine = int(self._path.stem)
        return [about for number, about in _live(self._folder) if number < mine]


def queue(device: str) -> list[dict[str, Any]]:
    """Who has the device (first) and who waits for it, in order."""
    return [about for _, about in _live(_folder(device))]


def _folder(device: str) -> Path:
    if fcntl is None:
        raise InputError("measure run: this system has no file locks; use Linux, macOS or WSL")
    folder = make_data_directory() / "queue" / device
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from None
    return folder


def _unusable(folder: Path, error: OSError) -> InputError:
    return InputError.of("PLUMBLINE_DATA", str(folder), f"it must be a folder that can be written ({error.strerror})")


@contextmanager
def _gate(folder: Path) -> Iterator[None]:
    """Tickets are drawn, read and thrown away by one process at a time; held for microseconds."""
    try:
        file = os.open(folder / "gate", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise _unusable(folder, error) from None
    finally:
        os.close(file)


def _write(file: int, content: bytes) -> None:
    if os.write(file, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    found = [(int(path.stem), path) for path in folder.glob("*.ticket") if path.stem.isdigit()]
    return sorted(found)


def _live(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    with _gate(folder):
        return [(number, about) for number, path in _numbered(folder) if (about := _read(path)) is not None]


def _read(path: Path) -> dict[str, Any] | None:
    """What a live ticket says; None for a stale one, which is thrown away."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return None
        return dict(json.loads(os.read(file, 1 << 16) or b"{}"))
    finally:
        os.close(file)
