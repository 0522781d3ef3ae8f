"""What a repository of the Hugging Face Hub stores: headers of its weights by range requests, never the weights."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from typing import Any, Final

from calc.errors import InputError
from calc.model.config import parse_config
from calc.sources.files import QUANTIZATION, with_declaration
from calc.sources.find import Found, found_gguf
from calc.sources.gguf import GgufHeader, joined, scan, split_name
from calc.sources.hub import Call, Fetched, Hub, HubId, NotThere, fetch, metadata_of
from calc.sources.safetensors import (
    INDEX,
    SINGLE,
    bad,
    gathered,
    header_length,
    parse_header,
    read_shards,
    stored_safetensors,
)
from calc.sources.stored import FROM_ELSEWHERE, StoredTensor, StoredTensors

_AT_ONCE = 8  # requests at a time
_FIRST = 2**17  # bytes of the first request: most headers fit
_MOST_OF_ONE_MODEL: Final = 48_000_000  # bytes of all its headers; 207,000 tensors, the most in use, take 30 million
_one = threading.Lock()  # header understood at a time by this process: the others' answers go on meanwhile


class _Budget:
    """Bytes of headers that one model may still take."""

    def __init__(self) -> None:
        self._left, self._lock = _MOST_OF_ONE_MODEL, threading.Lock()

    def take(self, length: int, where: str) -> None:
        """InputError where so many bytes more are too many."""
        with self._lock:
            self._left -= length
            if self._left < 0:
                raise bad(where, f"the headers of all its files have more than {_MOST_OF_ONE_MODEL:,} bytes")


def find_on_hub(hub_id: HubId, stored: bool = False, hub: Hub = Hub()) -> Found:  # noqa: B008 (frozen)
    """A model of the Hub: its config, and what it stores where that is asked for. InputError when it cannot be read."""
    if hub_id.file.endswith(".gguf"):
        return _gguf(hub_id, hub)
    try:
        config = fetch(hub_id, "config.json", hub=hub)
    except NotThere as error:
        if not hub_id.file:
            raise
        held = _stored(hub_id, hub)
        return Found(f"{hub_id.repo}/{hub_id.file}", None, held, True, str(error))
    told = (_told("config.json", hub_id, config, hub),)
    at_commit = replace(hub_id, revision=config.commit)
    name = f"{hub_id.repo}/{hub_id.file}".rstrip("/")
    brief = (
        replace(hub, seconds=hub.seconds / 4) if config.remark else hub
    )  # what cannot be reached is not waited for twice
    parsed, notes = _declared(at_commit, parse_config(config.data), brief)
    if not stored:
        return Found(name, parsed, weights_named=bool(hub_id.file), assumptions=told, notes=notes)
    try:
        return Found(name, parsed, _stored(at_commit, hub), bool(hub_id.file), assumptions=told, notes=notes)
    except InputError as error:
        if hub_id.file:
            raise
        return Found(name, parsed, assumptions=told, notes=(*notes, f"what the Hub stores is not shown: {error}"))


def _declared(at_commit: HubId, config: dict[str, Any], hub: Hub) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config with the quantisation of ModelOpt's `hf_quant_config.json` at the same commit, where the config declares none; a
    remark where the file is there and cannot be had."""
    if config.get("quantization_config") is not None:
        return config, ()
    try:
        return with_declaration(config, fetch(at_commit, QUANTIZATION, hub=hub).data), ()
    except NotThere:
        return config, ()
    except InputError as error:
        return config, (f"whether a {QUANTIZATION} declares a quantisation is not known: {error}",)


def _told(file: str, hub_id: HubId, found: Fetched, hub: Hub) -> str:
    shown = Call(hub, hub_id, file, hub.seconds).shown
    remark = f" ({found.remark})" if found.remark else ""
    return f"{file} of {shown}, revision {found.commit}{remark}"


def _stored(hub_id: HubId, hub: Hub) -> StoredTensors:
    """What the safetensors files of a repository store, or the one that is named."""
    if hub_id.file:
        return stored_safetensors(_header(hub_id, hub_id.file, hub), f"{hub_id.repo}/{hub_id.file}")
    try:
        index = fetch(hub_id, INDEX, FROM_ELSEWHERE.bytes, hub)
    except NotThere:
        return stored_safetensors(_header(hub_id, SINGLE, hub), f"{hub_id.repo}/{SINGLE}")
    where = f"{hub_id.repo}/{INDEX}"
    with _one:
        shards = read_shards(BytesIO(index.data).read, len(index.data), where, FROM_ELSEWHERE).shards
    budget = _Budget()
    call = Call(hub, hub_id, f"the header of a shard of {INDEX}", hub.stored_seconds)

    def read_all() -> dict[str, tuple[StoredTensor, ...]]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return dict(zip(shards, pool.map(lambda shard: _read_shard(call, shard, budget), shards), strict=True))

    return stored_safetensors(gathered(shards, call.run(read_all), where), where)


def _read_shard(call: Call, shard: str, budget: _Budget) -> tuple[StoredTensor, ...]:
    """The tensors of one shard, in the time that the whole call has left; a complaint names the shard."""
    part = Call(call.hub, call.hub_id, shard, call.left())
    try:
        return _read_header(part, budget)
    except InputError:
        raise
    except Exception as error:
        raise part.complaint(error) from None


def _header(hub_id: HubId, file: str, hub: Hub) -> tuple[StoredTensor, ...]:
    call = Call(hub, hub_id, file, hub.seconds)
    return call.run(lambda: _read_header(call, _Budget()))


def _read_header(call: Call, budget: _Budget) -> tuple[StoredTensor, ...]:
    """The tensors of a safetensors file, from one range request, or two where its header is long."""
    where = f"{call.hub_id.repo}/{call.file}"
    data, size = read_range(call, 0, _FIRST)
    length = header_length(data, size, where, FROM_ELSEWHERE)
    budget.take(length, where)
    if 8 + length > len(data):
        data += read_range(call, len(data), 8 + length - len(data))[0]
    with _one:
        call.left()
        return parse_header(BytesIO(data[8 : 8 + length]).read, length, size, where, FROM_ELSEWHERE)


def _gguf(hub_id: HubId, hub: Hub) -> Found:
    """A GGUF file of a repository, from its header."""
    call = Call(hub, hub_id, hub_id.file, hub.stored_seconds)
    header, commit = call.run(lambda: _read_gguf(call))
    told = (_told(hub_id.file, hub_id, Fetched(b"", commit), hub),)
    name = f"{hub_id.repo}/{hub_id.file}"
    return found_gguf(header, name, name, told)


def _read_gguf(call: Call) -> tuple[GgufHeader, str]:
    commit, _ = metadata_of(call)
    at_commit, budget = replace(call.hub_id, revision=commit), _Budget()

    def read(file: str) -> GgufHeader:
        part = Call(call.hub, at_commit, file, call.left())
        first, size = read_range(part, 0, _FIRST)

        where = f"{call.hub_id.repo}/{file}"

        def take(offset: int, length: int) -> bytes:
            more = first if offset == 0 else read_range(part, offset, length)[0]
            budget.take(len(more), where)
            return more

        return scan(take, size, where, FROM_ELSEWHERE)

    header = read(call.file)
    splits = header.metadata.get("split.count", 1)
    folder, _, name = call.file.rpartition("/")
    prefix = f"{folder}/" if folder else ""
    return joined(header, splits, lambda number: read(prefix + split_name(name, number, splits)), call.file), commit


@contextmanager
def _answer(call: Call, start: int, length: int) -> Iterator[Any]:
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    url = hf_hub_url(call.hub_id.repo, call.file, revision=call.hub_id.revision, endpoint=call.place)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={start}-{start + length - 1}"}
    with get_session().stream("GET", url, headers=headers, timeout=call.left()) as response:
        hf_raise_for_status(response)
        yield response


def read_range(call: Call, start: int, length: int) -> tuple[bytes, int | None]:
    """At most `length` bytes of a file from `start`, and its whole size where the server says it.

    A server that ignores ranges is read from its beginning and cut off; anything else than the bytes asked for is an
    InputError.
    """
    with _answer(call, start, length) as response:
        place = re.fullmatch(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19})", response.headers.get("Content-Range", ""))
        whole = response.headers.get("Content-Length", "")
        if response.status_code == 206 and place and int(place[1]) == start:
            total: int | None = int(place[2])
        elif response.status_code == 200 and start == 0:
            total = int(whole) if whole.isdecimal() and len(whole) < 20 else None
        else:
            raise InputError(
                f"MODEL: {call.shown}: the server does not give a part of {call.file}; download it and give its path",
                "MODEL",
            )
        data = bytearray()
        for chunk in response.iter_raw():
            data += chunk
            if len(data) >= length:
                break
            call.left()
    wanted = length if total is None else min(length, max(total - start, 0))
    if len(data) < wanted:
        raise InputError(
            f"MODEL: {call.shown}: {call.file} broke off after {len(data):,} of {wanted:,} bytes; try again",
            "MODEL",
        )
    return bytes(data[:length]), total
