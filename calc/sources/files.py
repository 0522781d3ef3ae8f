"""Configs from files and standard input. Nothing is executed; sizes are bounded before anything is read."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

from calc.errors import InputError
from calc.model.config import LARGEST_CONFIG, parse_config


def read_config(path: Path) -> dict[str, Any]:
    """The config of a config.json, or of a folder that holds one. InputError when it is missing, no plain file, or too large."""
    try:
        if path.is_dir():
            path = path / "config.json"
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError.of("MODEL", str(path), "it must be a plain file, the model's config.json")
        if status.st_size > LARGEST_CONFIG:
            raise InputError(
                f"MODEL: {str(path)!r} has {status.st_size:,} bytes; a config.json has at most {LARGEST_CONFIG:,}",
                "MODEL",
            )
        return parse_config(path.read_bytes())
    except OSError as error:
        raise InputError.of("MODEL", str(path), f"it cannot be read: {error.strerror}") from None


def read_standard_input() -> dict[str, Any]:
    """The config on standard input; one byte over the limit is enough to refuse it."""
    return parse_config(sys.stdin.buffer.read(LARGEST_CONFIG + 1))
