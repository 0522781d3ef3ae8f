"""Configs from files and standard input. Nothing is executed; sizes are bounded before anything is read."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from calc.errors import InputError
from calc.model.config import LARGEST_CONFIG, parse_config

QUANTIZATION: Final = "hf_quant_config.json"


@contextmanager
def open_plain(path: Path, largest: int | None = None, field: str = "MODEL") -> Iterator[tuple[BinaryIO, int]]:
    """A plain file, open for reading, and its size in bytes. InputError when it is missing, no plain file, or too large.

    `field` is what the complaint calls it. A pipe or a device is refused before it is opened, and so never waited for.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError.of(field, str(path), "it must be a plain file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if largest is not None and size > largest:
                raise InputError(
                    f"{field}: {str(path)!r} has {size:,} bytes; such a file has at most {largest:,}", field
                )
            yield file, size
    except OSError as error:
        raise InputError.of(field, str(path), f"it cannot be read: {error.strerror or error}") from None


def read_config(path: Path) -> dict[str, Any]:
    """The config of a config.json, or of a folder that holds one, with the quantisation that ModelOpt's `hf_quant_config.json` in the
    same folder declares where the config declares none. InputError when it is missing, no plain file, or too large."""
    file = path / "config.json" if os.path.isdir(path) else path
    with open_plain(file, LARGEST_CONFIG) as (opened, size):
        config = parse_config(opened.read(size))
    declaration = file.parent / QUANTIZATION
    if file.name == "config.json" and config.get("quantization_config") is None and os.path.lexists(declaration):
        with open_plain(declaration, LARGEST_CONFIG) as (opened, size):
            config["quantization_config"] = {**parse_config(opened.read(size)), "quant_method": "modelopt"}
    return config


def read_standard_input() -> dict[str, Any]:
    """The config on standard input; one byte over the limit is enough to refuse it. InputError when it is closed."""
    if sys.stdin is None:  # the caller closed it: `<&-`
        raise InputError("MODEL: standard input is closed; give the text of a config.json there", "MODEL")
    return parse_config(sys.stdin.buffer.read(LARGEST_CONFIG + 1))
