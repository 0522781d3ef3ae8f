"""The text of a config: JSON, and what people paste of one: a log's lines around it, a trailing comma, Python's way of writing it."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any, Final

from calc.errors import InputError, show

LARGEST_CONFIG: Final = 8 * 2**20  # bytes; a real config.json has 3.1 MB of modules that stay unquantised
_LARGEST_PYTHON: Final = 2**20  # bytes of a text that is read as Python writes it
_LAST_COMMA: Final = re.compile(r",(\s*[}\]])")


def parse_config(text: str | bytes) -> dict[str, Any]:
    """The object of a config.json. InputError when it is too large, not JSON, or not an object. NaN is refused; Infinity, which
    published configs of Mamba 2 hold as a limit, is a number that no size can be.

    A text that is not JSON is read once more from its first brace to its last, without last commas, and as a Python dictionary of
    plain values. Nothing in it is executed.
    """
    if len(text) > LARGEST_CONFIG:
        raise InputError(
            f"config: {len(text):,} bytes is too large; a config.json has at most {LARGEST_CONFIG:,}", "config"
        )
    try:
        data = _json(text)
    except InputError:
        raise
    except ValueError as error:
        if _POINTER in str(text[:60]):
            raise InputError(f"config: it is a Git LFS pointer, not the file itself; {PULL}", "config") from None
        data = _pasted(text)
        if data is None:
            raise InputError(f"config: not JSON ({error}); give the text of a config.json", "config") from None
    if not isinstance(data, dict):
        raise InputError.of("config", data, "it must be a JSON object, the text of a config.json")
    return data


_POINTER: Final = "version https://git-lfs.github.com"
PULL: Final = "`git lfs pull` fetches it"


def _json(text: str | bytes) -> Any:
    def constant(name: str) -> float:
        if name == "NaN":
            raise InputError.of("config", name, "JSON has no such number")
        return float(name)

    try:
        return json.loads(text, parse_constant=constant, object_pairs_hook=unique_members)
    except RecursionError:
        raise InputError("config: nested too deeply to be a config.json", "config") from None


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's members. InputError where a name is there twice with two values: readers differ in which of them they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: dict[str, Any] = {}
        for name, value in pairs:
            if seen.setdefault(name, value) != value:
                raise InputError(
                    f"{name[:80]}: the config gives it twice, as {show(seen[name])} and as {show(value)}", name[:80]
                )
    return found


def _pasted(text: str | bytes) -> Any:
    """What a text holds between its first brace and its last; None where that is neither JSON nor Python."""
    try:
        shown = text if isinstance(text, str) else text.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    inner = shown[shown.find("{") : shown.rfind("}") + 1]
    if not inner:
        return None
    try:
        return _json(_LAST_COMMA.sub(r"\1", inner))
    except InputError:
        raise
    except ValueError:
        pass
    if len(inner) > _LARGEST_PYTHON:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python about literals that it reads all the same
            return ast.literal_eval(inner)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
