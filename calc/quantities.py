"""Numbers as people write them: `32k`, `1T`, `2e12`, `1_000`: read into exact values, or refused with what is allowed."""

from __future__ import annotations

import re
from contextlib import suppress
from decimal import Decimal
from typing import Final

from calc.errors import InputError

_NUMBER: Final = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,3})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_THOUSANDS: Final = re.compile(r"(?<=\d)[_\s,](?=\d{3}(?:\D|$))", re.ASCII)
_DECIMAL: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12, "q": 10**15, "p": 10**15}
_BINARY: Final = {"k": 2**10, "ki": 2**10, "m": 2**20, "mi": 2**20}
_PLAIN: Final = re.compile(r"[+-]?[0-9.]+", re.ASCII)
_LONGEST: Final = 40  # characters of a number
LENGTHS: Final = frozenset(  # fields whose k is 1,024, as sequences are spoken of
    {"seq", "context", "prompt", "prompt_tokens", "output", "keep_window", "max_batched_tokens"}
)
ALLOWED: Final = "it must be a number, such as 4096, 32k, 1.5T or 2e12"


def read_number(text: str, field: str = "number", *, lengths: bool = False) -> Decimal:
    """The value that a text means. Letters are powers of ten (k, M, B or G, T, Q or P); of `lengths` in tokens k is 1,024.

    InputError names the field, the text and what is allowed.
    """
    letters = _DECIMAL | _BINARY if lengths else _DECIMAL
    plain = _THOUSANDS.sub("", text.strip())
    found = _NUMBER.fullmatch(plain) if len(plain) <= _LONGEST else None
    suffix = found[2].lower() if found else ""
    if found is None or (suffix and suffix not in letters):
        raise InputError.of(field, text, ALLOWED)
    return Decimal(found[1]) * letters.get(suffix, 1)


def read_whole(text: str, field: str = "number", *, lengths: bool = False) -> int:
    """The whole number that a text means. InputError as for `read_number`, and where it is not whole."""
    value = read_number(text, field, lengths=lengths)
    if value.adjusted() > _LONGEST or value != value.to_integral_value():
        raise InputError.of(field, text, "it must be a whole number, such as 4096, 32k or 1T")
    return int(value)


def whole_number(value: object) -> object:
    """For a plan's field: the whole number that a text means, as people write it; what is none is left for the field to judge."""
    with suppress(InputError):
        return read_whole(value) if isinstance(value, str) else value
    return value


def left_out(value: object) -> object:
    """For a plan's field: 0 is left out, as older links and commands have it."""
    return None if value in (0, "0") else value


def as_number(field: str, text: str) -> int | str:
    """The whole number that a flag's text means, as people write it; a plain number and anything else stay as they are."""
    if _PLAIN.fullmatch(text):
        return text
    try:
        return read_whole(text, field, lengths=field in LENGTHS)
    except InputError:
        return text
