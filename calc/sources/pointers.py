"""What a clone without its large files still says: Git LFS pointers, and an index whose shards are not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from calc.errors import InputError
from calc.sources.files import open_plain
from calc.sources.safetensors import INDEX, SINGLE, bad, read_shards

_POINTER: Final = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?size (\d{1,18})\n")
_LARGEST: Final = 1024  # bytes of a pointer (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)


def pointer_size(path: Path) -> int | None:
    """The size that a Git LFS pointer states of its file; None where the file is no pointer."""
    with open_plain(path) as (file, size):
        start = file.read(_LARGEST) if size <= _LARGEST else b""
    found = _POINTER.match(start)
    return int(found[1]) if found else None


def absent_weights(path: Path) -> str | None:
    """What is known of weights that are not here whole: of a pointer, or of an index whose shards are missing or are pointers; None
    where everything is there to be read."""
    if not path.name.endswith(".json"):
        size = pointer_size(path)
        return (
            None
            if size is None
            else f"{path.name} is a Git LFS pointer: its file has {size:,} bytes (git lfs pull fetches it)"
        )
    with open_plain(path) as (file, size):
        index = read_shards(file.read, size, str(path))
    shards = index.shards
    missing, pointers, total = 0, 0, 0
    for shard in shards:
        place = path.parent / shard
        if not place.exists():
            missing += 1
            continue
        stated = pointer_size(place)
        if stated is not None:
            pointers, total = pointers + 1, total + stated
    if not missing and not pointers:
        return None
    parts = [f"{missing} of its {len(shards)} shards are not here"] if missing else []
    parts += (
        [f"{pointers} of its {len(shards)} shards are Git LFS pointers to {total:,} bytes (git lfs pull fetches them)"]
        if pointers
        else []
    )
    size_line = index.metadata.get("total_size") if isinstance(index.metadata, dict) else None
    if isinstance(size_line, float) and size_line.is_integer():
        size_line = int(size_line)
    if type(size_line) is int and size_line >= 0:
        parts.append(f"its total_size is {size_line:,} bytes")
    return f"{path.name}: {'; '.join(parts)}"


def refuse_pointer(path: Path) -> None:
    """InputError for a file whose content is asked for and that is a pointer."""
    size = pointer_size(path)
    if size is not None:
        raise bad(path.name, f"it is a Git LFS pointer to {size:,} bytes, not the file itself; git lfs pull fetches it")


__all__ = ["INDEX", "SINGLE", "InputError", "absent_weights", "pointer_size", "refuse_pointer"]
