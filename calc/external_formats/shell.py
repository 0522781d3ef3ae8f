"""Command lines out of shell text: words, and the variables that the text itself sets. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from calc.errors import InputError
from calc.external_formats.draft import Table

LARGEST: Final = 2**15  # characters of a text; shlex copies a word at each character
_MOST_WORDS: Final = 20_000
_LONGEST_WORD: Final = 2**16
_COMMENT_LINE: Final = re.compile(r"(?m)^[ \t]*#.*\n?")
_COMPUTED: Final = re.compile(r"\$\([^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)|`[^`\n]*`")
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*\+?=")
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?-([^}]{0,300}))?\}|([A-Za-z_]\w*))")
_NUMBER: Final = re.compile(r"-\d*\.?\d+(?:[eE][-+]?\d+)?")
_PUNCTUATION: Final = ";&|()<>\n"

Known = dict[str, list[str]]


@dataclass(slots=True)
class CommandLine:
    """One command: its words, and the variables that the text sets."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def commands(text: str) -> list[CommandLine]:
    """Every command of a shell text, with the variables and arrays put in that the text gives a value.

    Conditions are not evaluated: every branch is read. InputError for text that is too long or no shell would read.
    """
    if len(text) > LARGEST:
        raise InputError(f"text: {len(text):,} characters is too long; a command has at most {LARGEST:,}", "text")
    plain = "\n".join(map(_without_comment, _COMMENT_LINE.sub("", text.replace("\r\n", "\n")).split("\n")))
    plain = _COMPUTED.sub("$_", plain.replace("\\\n", " "))
    plain = re.sub(r"\n{2,}", "\n", plain)
    known: Known = {}
    try:
        found = [_expanded(words, known) for line in _lines(plain) if (words := _assigned(line, known))]
    except ValueError as error:
        raise InputError(f"text: not a command line ({str(error).lower()})", "text") from None
    variables = {name: value[0] for name, value in known.items() if len(value) == 1}
    return [CommandLine(words, variables) for words in found]


def _without_comment(line: str) -> str:
    """The line up to a # that stands after a space and before no quotation mark."""
    before, mark, after = line.partition(" #")
    return before if mark and not set(after) & set("\"'") else line


def _lines(text: str) -> Iterator[list[str]]:
    """The words of each command; an array in parentheses is one line with its assignment."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    in_array = False
    for count, token in enumerate(lexer):
        if count > 5 * _MOST_WORDS:
            raise InputError(f"text: more than {5 * _MOST_WORDS:,} words", "text")
        separates = bool(token) and set(token) <= set(_PUNCTUATION)
        if not separates:
            words.append(token)
        elif not in_array and token.startswith("(") and words and words[-1].endswith("="):
            in_array = ")" not in token
            if not in_array:
                yield words
                words = []
        elif not in_array or ")" in token:
            if words:
                yield words
            words, in_array = [], False
    if words:
        yield words


def _assigned(words: list[str], known: Known) -> list[str]:
    """The words after the assignments in front, which are kept."""
    rest = words[1:] if words[0] in ("export", "env", "local", "declare") else words
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, value = rest[0].partition("=")
        if not value and len(rest) > 1 and not _ASSIGNMENT.match(rest[1]):  # an array: NAME=( ... )
            parts = [part for one in rest[1:] for part in (one.split() if one.startswith("--") else [one])]
            before = known.get(name[:-1], []) if name.endswith("+") else []
            known[name.rstrip("+")] = [*before, *_expanded(parts, known)][:_MOST_WORDS]
            return []
        known[name] = _expanded([value], known) if value else []
        rest = rest[1:]
    return rest


def _expanded(words: Iterable[str], known: Mapping[str, list[str]]) -> list[str]:
    """The words with the known variables put in; one that is a variable alone becomes its words. Unknown ones stay as they are."""
    made: list[str] = []
    for one in words:
        alone = _VARIABLE.fullmatch(one)
        name = alone and (alone[1] or alone[3])
        if name and name in known:
            made += [
                part for value in known[name] for part in (value.split() if value.lstrip().startswith("-") else [value])
            ]
        elif "$" in one:
            text = _filled(one, known)
            made += text.split() if text != one and text.startswith("-") else [text]
        else:
            made.append(one)
        if len(made) > _MOST_WORDS:
            raise InputError(f"text: more than {_MOST_WORDS:,} words in a command", "text")
    return made


def _filled(one: str, known: Mapping[str, list[str]]) -> str:
    parts, end, length = [], 0, 0
    for match in _VARIABLE.finditer(one):
        name, default = match[1] or match[3], match[2]
        value = " ".join(known[name]) if name in known else match[0] if default is None else default
        parts += [one[end : match.start()], value]
        end = match.end()
        length += len(value)
        if length > _LONGEST_WORD:
            raise InputError(f"text: a word grows beyond {_LONGEST_WORD:,} characters", "text")
    return "".join([*parts, one[end:]])


def options(words: list[str], table: Table) -> Iterator[tuple[str, str, Any]]:
    """(as written, key, value) of each option, and ("", "", word) of each word that belongs to none.

    A known switch takes a following true, false or auto alone, another known option one word, an unknown one all up to the next option.
    """
    index = 0
    while index < len(words):
        current = words[index]
        index += 1
        if not current.startswith("-") or _NUMBER.fullmatch(current) or not current.strip("-"):
            yield "", "", current
            continue
        shown, given, value = current.partition("=")
        key = key_of(shown)
        if given:
            yield shown, key, value
            continue
        setting = table.get(key)
        taken: list[str] = []
        while index < len(words) and not _is_option(words[index]):
            if setting and setting.is_switch and words[index].lower() not in ("true", "false", "on", "off", "auto"):
                break
            taken.append(words[index])
            index += 1
            if setting:
                break
        yield shown, key, " ".join(taken) if taken else True


def key_of(name: str) -> str:
    """An option's name as the tables hold it: without dashes in front, dashes within."""
    return name.lstrip("-").replace("_", "-")


def _is_option(one: str) -> bool:
    return one.startswith("-") and not _NUMBER.fullmatch(one) and bool(one.strip("-"))
