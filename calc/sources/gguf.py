"""GGUF headers: metadata and tensors, read without the tensors' bytes and from any place that gives byte ranges.

The gguf package knows the types and their blocks. Its reader is not used: it wants a file of full length, takes seconds and
hundreds of megabytes for a vocabulary, and follows a corrupt length without end. The format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

from calc.errors import InputError
from calc.sources.files import open_plain
from calc.sources.stored import MOST_ELEMENTS, MOST_TENSORS, HeaderLimit, StoredTensor, StoredTensors
from calc.units import MiB, round_up

LOCAL: Final = HeaderLimit(
    64 * MiB, 60.0
)  # a file of this machine; a vocabulary of 200,000 tokens with its merges takes 12
MOST_KEYS: Final = 2**16
LONGEST_NAME: Final = 256
LONGEST_TEXT: Final = 1024  # longer texts (chat templates) and arrays are passed over, not kept
_MOST_NUMBERS: Final = 2**16  # kept of all arrays
_LONGEST_KEY: Final = 2**16
_OFTEN: Final = 4096  # things read between two looks at the clock
MOST_SPLITS: Final = 1024
_FIRST = MiB
_SPLIT_NAME = re.compile(r"^(.+)-(\d{5})-of-(\d{5})\.gguf$")

Fetch = Callable[[int, int], bytes]  # (offset, length) -> at most so many bytes from there

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself: its metadata (long texts and arrays left out), and its tensors with their shapes as
    (output, ..., input)."""

    metadata: Mapping[str, Any]
    tensors: tuple[StoredTensor, ...]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class _Cursor:
    """Reads forward through bytes that are fetched as they are needed, up to the bytes and seconds of `limit`."""

    fetch: Fetch
    where: str
    limit: HeaderLimit
    order: str = "<"
    at: int = 0
    held: bytearray = field(default_factory=bytearray)
    kept: int = 0
    start: float = field(default_factory=time.thread_time)

    def bad(self, problem: str) -> InputError:
        return InputError(f"MODEL: {self.where}: {problem}", "MODEL")

    def need(self, count: int) -> None:
        """Have so many bytes more at hand."""
        end = self.at + count
        while end > len(self.held):
            self.check_time()
            most = self.limit.bytes
            if end > most:
                raise self.bad(f"a length in its header leads past {most:,} bytes; no more are read of such a file")
            wanted = min(max(end - len(self.held), len(self.held), _FIRST), most - len(self.held))
            more = self.fetch(len(self.held), wanted)
            if not more:
                raise self.bad(f"it ends after {len(self.held):,} bytes, within its header: it is truncated")
            self.held += more

    def check_time(self) -> None:
        if time.thread_time() - self.start > self.limit.seconds:
            raise self.bad(f"its header was not understood within {self.limit.seconds:g} s")

    def numbers(self, code: str) -> tuple[Any, ...]:
        """The numbers of a struct format, which stand here without holes."""
        code = self.order + code
        size = struct.calcsize(code)
        self.need(size)
        self.at += size
        return struct.unpack_from(code, self.held, self.at - size)

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def take(self, count: int) -> bytes:
        self.need(count)
        self.at += count
        return bytes(self.held[self.at - count : self.at])

    def text(self, longest: int) -> str:
        """A text; InputError when it is longer or not UTF-8."""
        length = self.number("Q")
        if length > longest:
            raise self.bad(f"a name in its header has {length:,} bytes; at most {longest} are allowed")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.bad("a name in its header is not UTF-8") from None

    def skip(self, count: int) -> None:
        self.need(count)
        self.at += count

    def value(self, kind: int) -> Any:
        """A value of metadata; None for a long text or array, which is passed over."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            length = self.number("Q")
            if length > LONGEST_TEXT:
                self.skip(length)
                return None
            return self.take(length).decode(errors="replace")
        if kind != _ARRAY:
            raise self.bad(f"its metadata has a value of type {kind}, which GGUF does not define")
        return self._array()

    def _array(self) -> list[Any] | None:
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            if count > LONGEST_TEXT or self.kept + count > _MOST_NUMBERS:
                self.skip(count * struct.calcsize(_SCALARS[kind]))
                return None
            self.kept += count
            return list(self.numbers(f"{count}{_SCALARS[kind]}"))
        if kind != _STRING:
            raise self.bad(f"its metadata has an array of type {kind}; only numbers and texts are read")
        self.need(8 * count)  # each text has at least its length
        length = struct.Struct(f"{self.order}Q").unpack_from
        for done in range(count):
            if done % _OFTEN == 0:
                self.check_time()
            if self.at + 8 > len(self.held):
                self.need(8)
            self.at += 8 + length(self.held, self.at)[0]
        self.need(0)
        return None


def scan(fetch: Fetch, file_size: int | None, where: str, limit: HeaderLimit = LOCAL) -> GgufHeader:
    """The header of a GGUF file.

    InputError unless every length stays in bounds, every type is known, and the tensors lie inside the file without overlap,
    or when it takes more than `limit`. `file_size` None: unknown.
    """
    cursor = _Cursor(fetch, where, limit)
    if cursor.take(4) != b"GGUF":
        raise cursor.bad("it does not begin with GGUF, so it is not a GGUF file")
    version = cursor.number("I")
    if version & 0xFFFF == 0:  # written by a machine of the other byte order
        cursor.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        raise cursor.bad(f"GGUF version {version} is not understood; 2 and 3 are")
    count, keys = cursor.number("Q"), cursor.number("Q")
    if count > MOST_TENSORS or keys > MOST_KEYS:
        raise cursor.bad(
            f"it would hold {count:,} tensors and {keys:,} keys; at most {MOST_TENSORS:,} and {MOST_KEYS:,} are read"
        )
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.text(_LONGEST_KEY)
        if key in metadata:
            raise cursor.bad(f"its metadata gives {key[:80]!r} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    return _tensors(cursor, count, metadata, file_size)


def _tensors(cursor: _Cursor, count: int, metadata: dict[str, Any], file_size: int | None) -> GgufHeader:
    """The tensors' rows, which follow the metadata, checked against each other and the file's size."""
    blocks = ggml_types()
    rows: list[tuple[int, StoredTensor]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for done in range(count):
        if done % _OFTEN == 0:
            cursor.check_time()
        name = cursor.text(LONGEST_NAME)
        if name in shapes:
            raise cursor.bad(f"tensor {name[:80]!r} is there twice")
        dimensions = cursor.number("I")
        if dimensions > 8:
            raise cursor.bad(f"tensor {name[:80]!r} has {dimensions:,} dimensions; ggml has at most 4")
        *sizes, kind, offset = cursor.numbers(f"{dimensions}QIQ")
        if kind not in blocks:
            raise cursor.bad(f"tensor {name[:80]!r} has type {kind}, which the installed gguf package does not know")
        rows.append((offset, _sized(cursor, name, sizes, *blocks[kind])))
        shapes[name] = tuple(reversed(sizes))
    _check_places(cursor, rows, metadata.get("general.alignment", 32), file_size)
    return GgufHeader(metadata, tuple(tensor for _, tensor in rows), shapes)


def _sized(cursor: _Cursor, name: str, sizes: list[int], dtype: str, size: int, block: int) -> StoredTensor:
    elements = prod(sizes)
    if elements > MOST_ELEMENTS:
        raise cursor.bad(f"tensor {name[:80]!r} would have {elements:.3g} elements")
    if (sizes[0] if sizes else 1) % block:
        raise cursor.bad(f"tensor {name[:80]!r}: rows of {sizes[0]:,} elements do not fill blocks of {block} ({dtype})")
    return StoredTensor(name, dtype, elements, elements // block * size)


def _check_places(
    cursor: _Cursor, rows: list[tuple[int, StoredTensor]], alignment: object, file_size: int | None
) -> None:
    """InputError when tensors overlap, lie out of line, or reach past the end of the file."""
    if type(alignment) is not int or not 1 <= alignment <= MiB or alignment & (alignment - 1):
        raise cursor.bad(f"general.alignment ({alignment!r}) must be a power of two")
    start, at = round_up(cursor.at, alignment), 0
    for offset, tensor in sorted(rows):
        if offset % alignment or offset < at:
            raise cursor.bad(f"tensor {tensor.name[:80]!r} at byte {offset:,} overlaps another or is out of line")
        at = offset + tensor.bytes
    if file_size is not None and start + at > file_size:
        raise cursor.bad(f"its tensors end at byte {start + at:,} and it has {file_size:,}: it is truncated")


def ggml_types() -> dict[int, tuple[str, int, int]]:
    """Every ggml type by its number: its name, the bytes of a block, and the elements in it (from the gguf package)."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, size, count) for kind, (count, size) in GGML_QUANT_SIZES.items()}


def stored_gguf(header: GgufHeader, where: str) -> StoredTensors:
    """The tensors as what the file stores."""
    blocks = {name: (size, count) for name, size, count in ggml_types().values()}
    source, url = (
        "the file's own header; blocks as in ggml-common.h",
        "https://github.com/ggml-org/ggml/blob/master/docs/gguf.md",
    )
    return StoredTensors(where, header.tensors, blocks, source, url)


def read_gguf(path: Path) -> GgufHeader:
    """The header of a GGUF file; the first of several splits stands for all of them, which lie next to it."""
    header = _read_one(path)
    splits = header.metadata.get("split.count", 1)
    return joined(
        header, splits, lambda number: _read_one(path.with_name(split_name(path.name, number, splits))), str(path)
    )


def joined(first: GgufHeader, splits: object, read: Callable[[int], GgufHeader], where: str) -> GgufHeader:
    """The headers of all splits as one. `read` gives the header of the split of that number, counted from 1."""
    if splits in (0, 1):
        return first
    if type(splits) is not int or not 1 < splits <= MOST_SPLITS:
        raise InputError(
            f"MODEL: {where}: split.count ({splits!r}) must be a whole number up to {MOST_SPLITS}", "MODEL"
        )
    if first.metadata.get("split.no"):
        raise InputError(
            f"MODEL: {where} is split {first.metadata['split.no']} of {splits}; give the first one", "MODEL"
        )
    tensors, shapes = list(first.tensors), dict(first.shapes)
    for number in range(2, splits + 1):
        more = read(number)
        if shapes.keys() & more.shapes.keys():
            raise InputError(f"MODEL: {where}: split {number} repeats a tensor of another split", "MODEL")
        tensors += more.tensors
        shapes |= more.shapes
    return GgufHeader(first.metadata, tuple(tensors), shapes)


def split_name(name: str, number: int, splits: int) -> str:
    """The name of another split of the same file: `model-00002-of-00003.gguf`."""
    found = _SPLIT_NAME.match(name)
    if not found:
        raise InputError(
            f"MODEL: {name!r} is one of {splits} splits; it must be named NAME-00001-of-{splits:05}.gguf", "MODEL"
        )
    return f"{found[1]}-{number:05}-of-{splits:05}.gguf"


def _read_one(path: Path) -> GgufHeader:
    with open_plain(path) as (file, size):

        def fetch(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        return scan(fetch, size, str(path))
