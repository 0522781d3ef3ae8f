"""The installed command `plumbline`: every command of `python -m calc` and `python -m measure` by one name, and `app`."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from calc.child_environment import ROOT, child_environment

_MEASURE = ("trace", "measure")
_ROWS = (
    ("trace", "memory of a training step, observed by running it with fake tensors"),
    ("measure", "measure this machine: plumbline measure run NAME; plumbline measure list"),
    ("app", "serve the pages; flags are Streamlit's, as --server.port 8600"),
    ("mcp", "answer an agent's questions over standard input (Model Context Protocol)"),
    ("--version", "the version of Plumbline"),
)
# in a checkout, and where a wheel puts it
_SETTINGS = (ROOT / ".streamlit" / "config.toml", Path(sys.prefix) / "share" / "plumbline" / "config.toml")


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one command. Returns the exit code: 0 answered, 2 bad input, 1 our own mistake, 130 ended by Ctrl-C."""
    try:
        return _answered(argv)
    except KeyboardInterrupt:  # while modules are still read
        return 130


def _answered(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    name = given[0] if given else "--help"
    if name == "app":
        return _app(given[1:])
    if name == "mcp":
        return _started(["-m", "pages.api.mcp", *given[1:]], "mcp")
    if name in _MEASURE:
        from measure.cli import main as measure_main

        return measure_main(given[1:] if name == "measure" else given)
    if name in ("-h", "--help"):
        from calc.cli import help_text

        print(help_text(_ROWS))
        return 0
    from calc.cli import main as calc_main

    return calc_main(given)


def _app(flags: Sequence[str]) -> int:
    return _started(["-m", "streamlit", "run", str(ROOT / "app.py"), *_settings(), *flags], "app")


def _started(words: Sequence[str], name: str) -> int:
    """Become a program of the pages, which are a part of their own."""
    if find_spec("streamlit") is not None:
        os.execve(sys.executable, [sys.executable, *words], child_environment())
    print(f"{name}: the pages are not installed; pip install 'plumbline[pages]'", file=sys.stderr)
    return 2


def _settings() -> Iterator[str]:
    """The app's settings as Streamlit's flags; what is given after them wins."""
    path = next(path for path in _SETTINGS if path.exists())
    for key, value in _flat(tomllib.loads(path.read_text(encoding="utf-8"))):
        values = value if isinstance(value, list) else [value]
        yield from (f"--{key}={str(one).lower() if isinstance(one, bool) else one}" for one in values)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
