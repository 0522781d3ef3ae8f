"""Which line of the user's own files is running."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

from calc.child_environment import ROOT

_PACKAGES = ("calc", "kernels", "measure")


class Line(NamedTuple):
    """A line of the user's files."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}"

    @property
    def text(self) -> str:
        """The line itself, without its indentation; "" when the file is gone."""
        import linecache

        return linecache.getline(self.file, self.number).strip()


NOWHERE = Line("", 0)


@cache
def _installed() -> tuple[str, ...]:
    """The folders whose files are not the user's: Python, its packages, and this product."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in kinds}
    folders |= {str(ROOT.resolve() / name) for name in _PACKAGES}
    return tuple(folder + "/" for folder in folders)


@cache
def _is_users(file: str) -> bool:
    if file.startswith("<") and not file.startswith("<ipython"):
        return False
    whole = str(Path(file).resolve())
    return not whole.startswith(_installed()) and "/site-packages/" not in whole and "/dist-packages/" not in whole


def _users(code: CodeType) -> bool:
    return _is_users(code.co_filename)


def running_line() -> Line:
    """The innermost line of the user's files that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _users(frame.f_code):
            return Line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return NOWHERE


def raising_line(trace: TracebackType | None) -> Line:
    """The innermost line of the user's files through which an exception came."""
    found = NOWHERE
    for frame, number in traceback.walk_tb(trace):
        if _users(frame.f_code):
            found = Line(frame.f_code.co_filename, number)
    return found
