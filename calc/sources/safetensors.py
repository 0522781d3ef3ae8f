"""Headers of safetensors files and their index. Only the header is read: bounded, checked, no byte of a tensor.

The format: 8 bytes with the header's length, the header as JSON, then the tensors without holes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from calc.errors import InputError
from calc.sources.files import open_plain
from calc.sources.json_text import NEVER, JsonText, Read, usual_member
from calc.sources.stored import MOST_ELEMENTS, MOST_TENSORS, HeaderLimit, StoredTensor, StoredTensors
from calc.units import MiB

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LOCAL: Final = HeaderLimit(100_000_000, 60.0)  # a file of this machine: the format's own limit
LOCAL_INDEX: Final = HeaderLimit(64 * MiB, 60.0)
MOST_SHARDS: Final = 4096
_NO_MAP: Final = "it has no weight_map, so it is not the index of safetensors files"
_WHOLE: Final = "(0|[1-9][0-9]{0,18})"
_ROW = usual_member(
    rf'\{{ "dtype" : "(\w{{1,16}})" , "shape" : \[([0-9, ]{{0,1400}})\] , "data_offsets" : \[ {_WHOLE} , {_WHOLE} \] \}}'
)
_tensor = partial(tuple.__new__, StoredTensor)  # by its fields as one tuple: half the time of the class's own way
_PLACE = usual_member(r'"([^"\\\x00-\x1f]{1,255})"')

# format -> bytes of a block and elements in it (safetensors 0.8, Dtype)
DTYPES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), (8, 1)),
    **dict.fromkeys(("F32", "I32", "U32"), (4, 1)),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), (2, 1)),
    **dict.fromkeys(("BOOL", "U8", "I8"), (1, 1)),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), (1, 1)),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), (3, 4)),
    "F4": (1, 2),
}


def bad(where: str, problem: str) -> InputError:
    """The complaint about a file: what it is called, and what is wrong with it."""
    return InputError(f"MODEL: {where}: {problem}", "MODEL")


def header_length(prefix: bytes, file_size: int | None, where: str, limit: HeaderLimit = LOCAL) -> int:
    """The length of the header, from the file's first 8 bytes. `file_size` None: unknown. InputError above `limit`."""
    if len(prefix) < 8:
        raise bad(where, f"{len(prefix)} bytes are too few for a safetensors file; it is truncated or something else")
    length = int.from_bytes(prefix[:8], "little")
    if not 2 <= length <= limit.bytes:
        raise bad(where, f"its header would have {length:,} bytes; at most {limit.bytes:,} are read of such a file")
    if file_size is not None and 8 + length > file_size:
        raise bad(where, f"its header needs {8 + length:,} bytes and the file has {file_size:,}: it is truncated")
    return length


def parse_header(
    read: Read, length: int, file_size: int | None, where: str, limit: HeaderLimit = LOCAL
) -> tuple[StoredTensor, ...]:
    """The tensors of a header of `length` bytes, which `read` gives in pieces, in the order of their bytes.

    InputError unless every tensor's bytes follow from its shape and format, and all lie without a hole or an overlap up
    to the end of the file; or when it takes more than the seconds of `limit`.
    """
    text = JsonText(read, length, lambda problem: bad(where, problem), limit.seconds)
    tensors, begins, ends = _tensors(text, where)
    text.end()
    order = _in_order(tensors, begins, ends, where)
    at = ends[order[-1]] if tensors else 0
    held = None if file_size is None else file_size - 8 - length
    if held is not None and held != at:
        problem = "the file is truncated" if held < at else "the file goes on after its last tensor"
        raise bad(where, f"its tensors take {at:,} bytes and {held:,} follow the header: {problem}")
    return tuple(map(tensors.__getitem__, order))


def _tensors(text: JsonText, where: str) -> tuple[list[StoredTensor], array[int], array[int]]:
    """The tensors of a header with the begin and end of each, in the header's order. Equal numbers are one object."""
    tensors: list[StoredTensor] = []
    begins, ends = array("q"), array("q")
    known: dict[tuple[str, str, int], tuple[str, int, int]] = {}
    for name, usual in text.members(_ROW):
        if usual:
            _, dtype, shape, first, last, _ = usual.groups()
            begin, end = int(first), int(last)
            facts = known.get((dtype, shape, end - begin))
            if facts is None:
                row = {"dtype": dtype, "shape": _sizes(shape, where), "data_offsets": [begin, end]}
                facts = known.setdefault((dtype, shape, end - begin), _facts(name, row, where))
        elif name == "__metadata__":
            text.texts()
            continue
        else:
            row = text.value()
            facts = _facts(name, row, where)
            begin, end = row["data_offsets"]
        tensors.append(_tensor((name, *facts)))
        begins.append(begin)
        ends.append(end)
        if len(tensors) > MOST_TENSORS:
            raise bad(where, f"it names more than {MOST_TENSORS:,} tensors")
    return tensors, begins, ends


def _in_order(tensors: Sequence[StoredTensor], begins: array[int], ends: array[int], where: str) -> Sequence[int]:
    """The tensors' places in the order of their bytes. InputError where a name is there twice, or for a hole or an overlap."""
    if len({tensor.name for tensor in tensors}) < len(tensors):
        twice = Counter(tensor.name for tensor in tensors).most_common(1)[0][0]
        raise bad(where, f"tensor {twice[:80]!r} is there twice")
    order: Sequence[int] = range(len(tensors))
    if array("q", [0]) + ends[:-1] == begins:  # as the library writes it
        return order
    order = array("q", sorted(order, key=lambda place: (begins[place], ends[place])))
    at = 0
    for place in order:
        if begins[place] != at:
            what = "overlaps the tensor before it" if begins[place] < at else "leaves a hole before it"
            raise bad(where, f"tensor {tensors[place].name[:80]!r} {what} ({begins[place]:,} after {at:,})")
        at = ends[place]
    return order


def _sizes(text: str, where: str) -> list[Any]:
    try:
        return list(json.loads(f"[{text}]"))
    except ValueError as error:
        raise bad(where, f"it is not JSON ({error})") from None


def _whole(values: object, most: int) -> bool:
    """Whether it is a list of at most `most` whole numbers that may count elements or bytes."""
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(value) is int and 0 <= value <= MOST_ELEMENTS for value in values)
    )


def _facts(name: str, row: object, where: str) -> tuple[str, int, int]:
    """Format, elements and bytes of a tensor, from its row. InputError where they do not agree."""
    shown = repr(name[:80])
    if not isinstance(row, dict):
        raise bad(where, f"tensor {shown} is not described by an object")
    dtype, shape, offsets = row.get("dtype"), row.get("shape"), row.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad(where, f"tensor {shown} has dtype {str(dtype)[:40]!r}; it must be one of {', '.join(DTYPES)}")
    if not _whole(shape, 64) or not _whole(offsets, 2) or len(offsets) != 2:  # type: ignore[arg-type]
        raise bad(where, f"tensor {shown}: shape and data_offsets must be lists of whole numbers, two of them offsets")
    begin, end = offsets  # type: ignore[misc]
    elements = prod(shape)  # type: ignore[arg-type]
    size, count = DTYPES[dtype]
    if elements > MOST_ELEMENTS:
        raise bad(where, f"tensor {shown} would have more than {MOST_ELEMENTS:,} elements")
    if elements * size != (end - begin) * count:
        raise bad(where, f"tensor {shown}: {elements:,} elements of {dtype} do not take {end - begin:,} bytes")
    return dtype, elements, end - begin


def read_file(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of one file."""
    with open_plain(path) as (file, size):
        length = header_length(file.read(8), size, str(path))
        return parse_header(file.read, length, size, str(path))


class Index(NamedTuple):
    """An index: its metadata, and the tensors' names by shard, in its order."""

    metadata: Any
    shards: Mapping[str, list[str]]


def read_shards(read: Read, length: int, where: str, limit: HeaderLimit = LOCAL_INDEX) -> Index:
    """An index of `length` bytes, which `read` gives in pieces. A shard is a plain name in the index's folder: nothing leads elsewhere."""
    if length > limit.bytes:
        raise bad(where, f"it has {length:,} bytes; at most {limit.bytes:,} of an index are read")
    text = JsonText(read, length, lambda problem: bad(where, problem), limit.seconds)
    found: dict[str, Any] = {}
    for key, _ in text.members(NEVER):
        if key in found:
            raise bad(where, f"it gives {key[:80]!r} twice")
        found[key] = _shards(text, where) if key == "weight_map" else text.value()
    text.end()
    if not found.get("weight_map"):
        raise bad(where, _NO_MAP)
    return Index(found.get("metadata"), found["weight_map"])


def _shards(text: JsonText, where: str) -> dict[str, list[str]]:
    shards: dict[str, list[str]] = {}
    for count, (name, usual) in enumerate(text.members(_PLACE, _NO_MAP), 1):
        shard = usual[2] if usual else text.value()
        if not isinstance(shard, str) or shard not in shards:
            _check_shard(shard, len(shards), where)
        shards.setdefault(shard, []).append(name)
        if count > MOST_TENSORS:
            raise bad(where, f"it names more than {MOST_TENSORS:,} tensors")
    return shards


def _check_shard(shard: object, before: int, where: str) -> None:
    if not isinstance(shard, str) or not shard.endswith(".safetensors") or set(shard) & {"/", "\\", "\0"}:
        shown = str(shard)[:80]
        raise bad(where, f"shard {shown!r} must be the name of a .safetensors file in the folder of the index")
    if before == MOST_SHARDS:
        raise bad(where, f"it names more shards than {MOST_SHARDS:,}; at most {MOST_SHARDS:,} are read")


def gathered(
    shards: Mapping[str, list[str]], read: Mapping[str, tuple[StoredTensor, ...]], where: str
) -> tuple[StoredTensor, ...]:
    """The tensors of all shards. InputError when the index names one that its shard does not hold, or one is stored twice."""
    seen: set[str] = set()
    for shard, names in shards.items():
        held = {tensor.name for tensor in read[shard]}
        missing = next((name for name in names if name not in held), None)
        if missing is not None:
            raise bad(where, f"it places tensor {missing[:80]!r} in {shard}, which does not hold it")
        if held & seen:
            raise bad(where, f"tensor {min(held & seen)[:80]!r} is stored in two shards")
        seen |= held
        if len(seen) > MOST_TENSORS:
            raise bad(where, f"it holds more than {MOST_TENSORS:,} tensors")
    return tuple(tensor for shard in shards for tensor in read[shard])


def read_index(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of every shard of an index."""
    with open_plain(path) as (file, size):
        shards = read_shards(file.read, size, str(path)).shards
    return gathered(shards, {shard: read_file(path.parent / shard) for shard in shards}, str(path))


def stored_safetensors(tensors: tuple[StoredTensor, ...], where: str, notes: tuple[str, ...] = ()) -> StoredTensors:
    """The tensors as what the checkpoint stores."""
    source = "the file's own header, in the safetensors format"
    return StoredTensors(where, tensors, DTYPES, source, "https://github.com/huggingface/safetensors#format", notes)


def read_safetensors(path: Path) -> StoredTensors:
    """What a .safetensors file, or an index with its shards, stores."""
    tensors = read_index(path) if path.name.endswith(".json") else read_file(path)
    index = path.parent / INDEX
    notes: tuple[str, ...] = ()
    if "-of-" in path.name and not path.name.endswith(".json") and index.exists():
        notes = (f"{path.name} is one shard of several; {index} counts them all",)
    return stored_safetensors(tensors, path.name, notes)


def weights_of(folder: Path) -> Path | None:
    """The safetensors index or file of a model's folder, by the names that transformers writes; None when there is neither."""
    return next((folder / name for name in (INDEX, SINGLE) if (folder / name).exists()), None)
