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
LARGEST_YAML: Final = 2**17  # bytes


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
    file = _config_file(path) if os.path.isdir(path) else path
    with open_plain(file, LARGEST_CONFIG) as (opened, size):
        text = opened.read(size)
    config = parse_yaml(text) if file.suffix in (".yml", ".yaml") else parse_config(text)
    declaration = file.parent / QUANTIZATION
    if file.name == "config.json" and config.get("quantization_config") is None and os.path.lexists(declaration):
        with open_plain(declaration, LARGEST_CONFIG) as (opened, size):
            config = with_declaration(config, opened.read(size))
    return config


def with_declaration(config: dict[str, Any], text: bytes) -> dict[str, Any]:
    """The config with what the text of a `hf_quant_config.json` declares."""
    return {**config, "quantization_config": {**parse_config(text), "quant_method": "modelopt"}}


def _config_file(folder: Path) -> Path:
    """The config of a folder: config.json, or Mistral's params.json where there is no other."""
    names = ("config.json", "params.json")
    return next((folder / name for name in names if os.path.lexists(folder / name)), folder / names[0])


def parse_yaml(text: bytes) -> dict[str, Any]:
    """The object of a YAML file of plain values, read by the safe loader. InputError for anything else, for more than 128 KiB, and
    for anchors and aliases, of which a small file makes a large one."""
    import yaml  # type: ignore[import-untyped]

    if len(text) > LARGEST_YAML:
        raise InputError(
            f"config: {len(text):,} bytes is too large; such a YAML file has at most {LARGEST_YAML:,}", "config"
        )
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        shown = text.decode("utf-8-sig")
        for event in yaml.parse(shown, Loader=loader):
            if isinstance(event, yaml.AliasEvent):
                raise InputError("config: YAML aliases (*) are not read", "config")
        data = yaml.load(shown, Loader=loader)
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else "nested too deeply"
        raise InputError(f"config: not YAML ({reason})", "config") from None
    if not isinstance(data, dict):
        raise InputError.of("config", data, "it must be a YAML object")
    return {str(key): value for key, value in data.items()}


def read_standard_input() -> dict[str, Any]:
    """The config on standard input; one byte over the limit is enough to refuse it. InputError when it is closed."""
    if sys.stdin is None:  # the caller closed it: `<&-`
        raise InputError("MODEL: standard input is closed; give the text of a config.json there", "MODEL")
    return parse_config(sys.stdin.buffer.read(LARGEST_CONFIG + 1))
