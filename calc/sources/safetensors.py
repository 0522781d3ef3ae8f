"""Headers of safetensors files and their index. Only the header is read: bounded, checked, no byte of a tensor.

The format: 8 bytes with the header's length, the header as JSON, then the tensors without holes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from calc.errors import InputError
from calc.sources.files import open_plain
from calc.sources.stored import MOST_ELEMENTS, MOST_TENSORS, StoredTensor, StoredTensors
from calc.units import MiB

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LARGEST_HEADER: Final = 100_000_000  # bytes, the format's own limit
LARGEST_INDEX: Final = 64 * MiB
MOST_SHARDS: Final = 4096
_MOST_COMMAS: Final = 12 * MOST_TENSORS

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


def header_length(prefix: bytes, file_size: int | None, where: str) -> int:
    """The length of the header, from the file's first 8 bytes. `file_size` None: unknown."""
    if len(prefix) < 8:
        raise bad(where, f"{len(prefix)} bytes are too few for a safetensors file; it is truncated or something else")
    length = int.from_bytes(prefix[:8], "little")
    if not 2 <= length <= LARGEST_HEADER:
        raise bad(where, f"its header would have {length:,} bytes; a safetensors header has at most {LARGEST_HEADER:,}")
    if file_size is not None and 8 + length > file_size:
        raise bad(where, f"its header needs {8 + length:,} bytes and the file has {file_size:,}: it is truncated")
    return length


def parse_header(header: bytes, file_size: int | None, where: str) -> tuple[StoredTensor, ...]:
    """The tensors of a header, in the order of their bytes.

    InputError unless every tensor's bytes follow from its shape and format, and all lie without a hole or an overlap up
    to the end of the file.
    """
    table = _object(header, where)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise bad(where, "__metadata__ in its header is not an object")
    found = sorted((_tensor(name, row, where) for name, row in table.items()), key=lambda row: row[:2])
    at = 0
    for begin, end, tensor in found:
        if begin != at:
            what = "overlaps the tensor before it" if begin < at else "leaves a hole before it"
            raise bad(where, f"tensor {tensor.name[:80]!r} {what} ({begin:,} after {at:,})")
        at = end
    held = None if file_size is None else file_size - 8 - len(header)
    if held is not None and held != at:
        problem = "the file is truncated" if held < at else "the file goes on after its last tensor"
        raise bad(where, f"its tensors take {at:,} bytes and {held:,} follow the header: {problem}")
    return tuple(tensor for _, _, tensor in found)


def _object(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object whose size is bounded before it is built."""
    if text[:1] != b"{":
        raise bad(where, "what should be JSON does not begin with {")
    if text.count(b"{") > MOST_TENSORS + 2 or text.count(b",") > _MOST_COMMAS:
        raise bad(where, f"it names more than {MOST_TENSORS:,} tensors")

    def refuse(constant: str) -> Any:
        raise bad(where, f"{constant} is no number in JSON")

    try:
        table = json.loads(text, parse_constant=refuse)
    except InputError:
        raise
    except RecursionError:
        raise bad(where, "its JSON is nested too deeply") from None
    except ValueError as error:
        raise bad(where, f"it is not JSON ({error})") from None
    if not isinstance(table, dict):
        raise bad(where, "its JSON is not an object")
    return table


def _whole(values: object, most: int) -> bool:
    """Whether it is a list of at most `most` whole numbers that may count elements or bytes."""
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(value) is int and 0 <= value <= MOST_ELEMENTS for value in values)
    )


def _tensor(name: str, row: object, where: str) -> tuple[int, int, StoredTensor]:
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
    return begin, end, StoredTensor(name, dtype, elements, end - begin)


def read_file(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of one file."""
    with open_plain(path) as (file, size):
        length = header_length(file.read(8), size, str(path))
        header = file.read(length)
    if len(header) < length:
        raise bad(str(path), "it became shorter while it was read")
    return parse_header(header, size, str(path))


def shards_named(text: bytes, where: str) -> tuple[dict[str, Any], list[str]]:
    """An index, and the shards that it names, in its order. A shard is a plain name in the index's folder: nothing leads elsewhere."""
    table = _object(text, where)
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad(where, "it has no weight_map, so it is not the index of safetensors files")
    shards = list({shard: None for shard in weight_map.values() if isinstance(shard, str)})
    wrong = next((shard for shard in weight_map.values() if not isinstance(shard, str)), "")
    for shard in (*shards, *((str(wrong),) if wrong != "" else ())):
        if not shard.endswith(".safetensors") or set(shard) & {"/", "\\", "\0"}:
            raise bad(where, f"shard {shard[:80]!r} must be the name of a .safetensors file in the folder of the index")
    if len(shards) > MOST_SHARDS:
        raise bad(where, f"it names {len(shards):,} shards; at most {MOST_SHARDS:,} are read")
    return table, shards


def shards_of(text: bytes, where: str) -> dict[str, list[str]]:
    """The tensors' names by shard, from an index."""
    table, names = shards_named(text, where)
    shards: dict[str, list[str]] = {shard: [] for shard in names}
    for name, shard in table["weight_map"].items():
        shards[shard].append(name)
    return shards


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
    with open_plain(path, LARGEST_INDEX) as (file, size):
        shards = shards_of(file.read(size), str(path))
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
