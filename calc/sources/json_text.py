"""JSON of any size read forward in pieces, member by member: what is not kept costs no memory, and no single step takes long.

For headers and indexes of checkpoints, which anyone may have written. `json.loads` would build the whole first, out of reach of
any clock.
"""

from __future__ import annotations

import codecs
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from calc.errors import InputError
from calc.model.config_text import unique_members

WINDOW: Final = 2**16  # characters of the largest name, or of a value that is decoded as a whole
_PIECE: Final = 2**18  # bytes read at a time: the clock is looked at for each
_SPACE: Final = "[ \t\n\r]*+"
_NAME = re.compile(rf'{_SPACE}"((?:[^"\\\x00-\x1f]|\\.)*+)"{_SPACE}:')
_OPEN = re.compile(rf"{_SPACE}\{{{_SPACE}(\}}?)")
_STOP = re.compile(rf"{_SPACE}([,}}])")
_SPACES = re.compile(_SPACE)
_QUOTE = re.compile(rf'{_SPACE}"')
_INSIDE = re.compile(r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
NEVER: Final = re.compile(r"(?!)")  # no member is usual
_NO_OBJECT: Final = "what should be JSON does not begin with {"
_LONGEST_ESCAPE: Final = 6

Read = Callable[[int], bytes]  # at most so many bytes more


def usual_member(value: str) -> re.Pattern[str]:
    """The pattern of a member whose name has no escapes (group 1) and whose value is written as `value`; the last group is the comma
    or brace after it. In `value` a space stands for JSON's white space."""
    return re.compile(rf' "([^"\\\x00-\x1f]{{0,{WINDOW // 4}}}+)" : {value} ([,}}])'.replace(" ", _SPACE))


class JsonText:
    """A JSON text of `length` bytes from `read`. Every fault is an InputError made by `bad`, and so is the end of the time."""

    def __init__(self, read: Read, length: int, bad: Callable[[str], InputError], seconds: float) -> None:
        self._read, self._left, self._bad, self._seconds = read, length, bad, seconds
        self._end = time.thread_time() + seconds  # of this thread's own work: a busy machine refuses nothing
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at = "", 0
        self._decoder = json.JSONDecoder(parse_constant=self._constant, object_pairs_hook=unique_members)

    def members(
        self, usual: re.Pattern[str], otherwise: str = _NO_OBJECT
    ) -> Iterator[tuple[str, re.Match[str] | None]]:
        """The members of the object that begins here: its name, and the match of `usual`; None for a value of another form, which
        the caller takes by `value`, `texts` or `members` before it goes on. `otherwise`: the complaint where no object begins here."""
        found = self._expected(_OPEN, otherwise)
        stop = found[1] or ","
        while stop == ",":
            if len(self._text) - self._at < WINDOW:
                self._fill()
            match = usual.match(self._text, self._at)
            if match:
                self._at = match.end()
                stop = match[match.lastindex or 0]
                yield match[1], match
            else:
                yield self._name(), None
                self._fill()
                stop = self._expected(_STOP, "it is not JSON (no comma or } after a value)")[1]

    def value(self) -> Any:
        """The value that begins here, decoded: at most WINDOW characters of it."""
        self._fill()
        begin = self._past(_SPACES).end()
        try:
            value, self._at = self._decoder.raw_decode(self._text, begin)
        except InputError as error:
            raise self._bad(str(error)) from None
        except RecursionError:
            raise self._bad("its JSON is nested too deeply") from None
        except ValueError as error:
            if len(self._text) - begin >= WINDOW - 1:
                raise self._bad(f"a value in it is no JSON, or longer than {WINDOW:,} characters") from None
            raise self._bad(f"it is not JSON ({error})") from None
        if self._at - begin > WINDOW:
            raise self._bad(f"a value in it is longer than {WINDOW:,} characters")
        return value

    def texts(self) -> None:
        """Pass over the object of texts that begins here, however long they are."""
        for _ in self.members(NEVER, "__metadata__ in its header is not an object"):
            self._fill()
            self._expected(_QUOTE, "a text is expected where it has another value")
            while True:
                self._at = self._past(_INSIDE).end()
                if self._left and len(self._text) - self._at < _LONGEST_ESCAPE:
                    self._fill()
                    continue
                break
            if self._text[self._at : self._at + 1] != '"':
                raise self._bad("it is not JSON (a text does not end)")
            self._at += 1

    def end(self) -> None:
        """InputError unless nothing but white space is left."""
        while True:
            self._at = self._past(_SPACES).end()
            if self._at < len(self._text):
                raise self._bad("it is not JSON (it goes on after its last brace)")
            if not self._left:
                return
            self._fill()

    def _name(self) -> str:
        found = self._expected(_NAME, "it is not JSON (no name of a member)")
        try:
            return str(json.loads(f'"{found[1]}"'))
        except ValueError as error:
            raise self._bad(f"it is not JSON ({error})") from None

    def _past(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        assert found  # it matches nothing too
        return found

    def _expected(self, pattern: re.Pattern[str], problem: str) -> re.Match[str]:
        self._fill()
        found = pattern.match(self._text, self._at)
        if not found:
            raise self._bad(problem)
        self._at = found.end()
        return found

    def _fill(self) -> None:
        """Have WINDOW characters more at hand, or all that are left."""
        if len(self._text) - self._at >= WINDOW or not self._left:
            return
        parts = [self._text[self._at :]]
        have = len(parts[0])
        while have < WINDOW and self._left:
            if time.thread_time() > self._end:
                raise self._bad(f"it was not understood within {self._seconds:g} s")
            piece = self._read(min(_PIECE, self._left))
            if not piece:
                raise self._bad("it became shorter while it was read")
            self._left -= len(piece)
            try:
                parts.append(self._utf8.decode(piece, final=not self._left))
            except UnicodeDecodeError as error:
                raise self._bad(f"it is not JSON ({error})") from None
            have += len(parts[-1])
        self._text, self._at = "".join(parts), 0

    def _constant(self, name: str) -> Any:
        raise InputError(f"{name} is no number in JSON")
