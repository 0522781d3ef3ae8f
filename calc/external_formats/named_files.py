"""Files that a run names: opened where they lie next to it under a plain name, else named."""

from __future__ import annotations

import stat
from typing import Any, Final

from calc.errors import InputError
from calc.external_formats.documents import flattened, parse
from calc.external_formats.draft import Draft, NotSaid, Table, take

NOT_OPENED: Final = "a file of its own, which is not opened; read it by itself"
_LARGEST: Final = 2**17  # bytes of a file
_MOST: Final = 8  # files of a run
_ENDINGS: Final = (".json", ".yaml", ".yml", ".toml")


def take_file(draft: Draft, value: Any, table: Table, whole: frozenset[str] = frozenset()) -> str:
    """Take the settings of a file that a run names; what to say of it. NotSaid where it is not opened, with the reason.

    It is opened where the caller gave the folder of the run, the name has no folder in it, and it is a plain file there and no link.
    """
    name = str(value).removeprefix("./")
    if draft.folder is None or not name.endswith(_ENDINGS) or not _is_plain(name):
        raise NotSaid(NOT_OPENED)
    if name in draft.opened or len(draft.opened) >= _MOST:
        raise NotSaid(
            "a file that is read already" if name in draft.opened else f"more than {_MOST} files are not opened"
        )
    draft.opened.append(name)
    _, data = parse(_text(draft, name))
    draft.understood.append(f"{name}: the file next to the run, as follows")
    take(draft, table, flattened(data, whole))
    return "read from the file next to the run"


def _is_plain(name: str) -> bool:
    """Whether the text is the name of a file, and no path."""
    return 0 < len(name) <= 255 and not set(name) & set("/\\\0:~$*?") and not name.startswith((".", "-"))


def _text(draft: Draft, name: str) -> str:
    """The text of the file. NotSaid where it is missing, a link, no plain file, too large or no text."""
    assert draft.folder is not None
    path = draft.folder / name
    try:
        kind = path.lstat()
        if not stat.S_ISREG(kind.st_mode):
            raise NotSaid("a file of its own, which is a link or no plain file, and not opened")
        if kind.st_size > _LARGEST:
            raise NotSaid(f"a file of its own, which is larger than {_LARGEST:,} bytes, and not opened")
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError:
        raise NotSaid("a file of its own, which is not in the folder of the run") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise NotSaid("a file of its own, which is no text in UTF-8") from None
    if len(data) > _LARGEST or "\0" in text:
        raise InputError.of("FILE", name, f"it must be a text of at most {_LARGEST:,} bytes")
    return text
