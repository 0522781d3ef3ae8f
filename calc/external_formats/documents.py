"""Config files as data: JSON, YAML and TOML, bounded and never executed; nested settings under dotted names."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from calc.errors import InputError
from calc.external_formats.shell import key_of
from calc.sources.files import parse_yaml

_KEY: Final = re.compile(r"""(?m)^[ \t]*[\w.'"-]+[ \t]*:(\s|$)""")
_LARGEST_TOML: Final = 2**17
_MOST_DOTS: Final = 400  # a name with more would take its reader long
_DEEPEST: Final = 12
_MOST: Final = 2_000  # settings of a file


def parse_json(text: str) -> dict[str, Any]:
    """The object of a JSON text. InputError for anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:120] if not isinstance(error, RecursionError) else "nested too deeply"
        raise InputError(f"text: not JSON ({reason})", "text") from None
    if not isinstance(data, dict):
        raise InputError.of("text", data, "it must be a JSON object")
    return data


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. InputError for anything else."""
    if len(text) > _LARGEST_TOML or any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        raise InputError(
            f"text: a TOML file here has at most {_LARGEST_TOML:,} characters and {_MOST_DOTS} dots in a line", "text"
        )
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:120] if not isinstance(error, RecursionError) else "nested too deeply"
        raise InputError(f"text: not TOML ({reason})", "text") from None


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """A config file's kind and its settings. InputError when it is none."""
    if text.lstrip().startswith("{"):
        return "json", parse_json(text)
    if any(line.strip().startswith("[") and line.strip().endswith("]") for line in text.splitlines()[:400]):
        try:
            return "toml", parse_toml(text)
        except InputError:
            if ":" not in text:
                raise
    if not _KEY.search(text):
        raise InputError(
            "text: neither a command line of a known tool nor a config file; --help lists the tools", "text"
        )
    return "yaml", parse_yaml(text.encode("utf-8", "replace"))


def flattened(data: Mapping[str, Any], whole: frozenset[str] = frozenset()) -> Iterator[tuple[str, str, Any]]:
    """(as written, key, value) of each setting, nested ones under dotted names, those of `whole` as they are.

    InputError for too many or too deep ones.
    """
    for count, (name, value) in enumerate(_leaves(data, "", 1, whole)):
        if count >= _MOST:
            raise InputError(f"text: more than {_MOST:,} settings in a config file", "text")
        yield name, key_of(name), value


def _leaves(data: Mapping[str, Any], prefix: str, depth: int, whole: frozenset[str]) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
        raise InputError(f"text: settings nested deeper than {_DEEPEST}", "text")
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and path not in whole:
            yield from _leaves(value, f"{path}.", depth + 1, whole)
        else:
            yield path, value
