"""Headers that anyone may have written: few bytes, little memory, a clock that is looked at, and one at a time."""

from __future__ import annotations

import json
import struct
import threading
import tracemalloc
from dataclasses import replace
from io import BytesIO

import pytest

from calc.errors import InputError
from calc.sources import gguf, hub_weights, json_text
from calc.sources.hub import Hub, HubId
from calc.sources.hub_weights import find_on_hub
from calc.sources.safetensors import parse_header, read_shards
from calc.sources.stored import FROM_ELSEWHERE
from tests.calc.sources.gguf_files import write_gguf
from tests.calc.sources.hub_server import FakeHub, serving
from tests.calc.sources.test_gguf import LLAMA, llama
from tests.calc.sources.test_hub import CONFIG

ID = HubId("owner/name")


def header(count: int) -> bytes:
    rows = {
        f"layers.{at}.weight": {"dtype": "F32", "shape": [2], "data_offsets": [8 * at, 8 * at + 8]}
        for at in range(count)
    }
    return json.dumps(rows, separators=(",", ":")).encode()


def read(text: bytes) -> int:
    return len(parse_header(BytesIO(text).read, len(text), None, "it", FROM_ELSEWHERE))


def peak_of(action) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_tensor_costs_its_name_and_a_row_and_no_parsed_json():
    text = header(20_000)
    peak = peak_of(lambda: read(text))
    assert peak < 20_000 * 330 + 4 * json_text.WINDOW * 4  # json.loads alone takes 700 for each


SIZE = 1_000_000
HOSTILE = {
    "lists": b'{"a":' + b"[" * SIZE,
    "flat lists": b'{"a":[' + b"[]," * (SIZE // 3) + b"[]]}",
    "objects": b'{"a":[' + b"{}," * (SIZE // 3) + b"{}]}",
    "colons": b'{"a":{' + b'"b":1,' * (SIZE // 6) + b'"b":1}}',
    "numbers": b'{"a":[' + b"300," * (SIZE // 4) + b"1]}",
    "one number": b'{"a":' + b"9" * SIZE + b"}",
    "one text": b'{"a":"' + b"a" * SIZE + b'"}',
    "one name": b'{"' + b"a" * SIZE + b'":1}',
    "backslashes": b'{"' + b"\\" * SIZE,
    "spaces": b"{" + b" " * SIZE + b"]",
    "no tensors": b"{" + b'"a":{},' * (SIZE // 7) + b'"a":{}}',
    "metadata of metadata": b'{"__metadata__":{' + b'"__metadata__":{' * (SIZE // 16),
    "a text without end in the metadata": b'{"__metadata__":{"a":"' + b"\\n" * (SIZE // 2),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_in_less_memory_than_eight_times_its_bytes(name):
    text = HOSTILE[name]

    def refused() -> None:
        with pytest.raises(InputError, match=r"^MODEL: it: "):
            read(text)

    assert peak_of(refused) < 8 * SIZE


def test_long_metadata_is_passed_over():
    text = b'{"__metadata__":{"a":"' + b'\\u00e9\\"x' * 100_000 + b'","b":""},' + header(3)[1:]
    assert read(text) == 3
    assert peak_of(lambda: read(text)) < 8 * json_text.WINDOW * 4 + 500_000


@pytest.mark.parametrize(
    "text",
    [
        b'{"__metadata__":{"a":1}}',
        b'{"__metadata__":{"a":"b",}}',
        b'{"__metadata__":{"a":"\\x"}}',
        b'{"a":{"dtype":"F16","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        header(1)[:-1] + b"," + header(1)[1:],
        header(1) + b" x",
        header(1).replace(b"[2]", b"[02]"),
        header(1).replace(b"[2]", b"[2,]"),
        header(1).replace(b"[0,8]", b"[00,8]"),
        header(2).replace(b"},", b"}"),
        header(1)[:-1] + b",}",
    ],
)
def test_what_the_format_does_not_allow_is_refused(text):
    with pytest.raises(InputError):
        read(text)


@pytest.mark.parametrize("change", [(b",", b" ,\n"), (b":", b"\t: "), (b'"dtype":"F32",', b'"dtype":"F32","x":[{}],')])
def test_white_space_other_keys_and_their_order_change_nothing(change):
    assert read(header(5).replace(*change)) == 5
    turned = {name: dict(reversed(row.items())) for name, row in json.loads(header(5)).items()}
    assert read(json.dumps(turned).encode()) == 5


def test_a_header_is_the_same_wherever_its_pieces_are_cut(monkeypatch):
    text = b'{"__metadata__":{"\xc3\xa9":"\xf0\x9f\x98\x80\\u00e9"},' + header(200)[1:].replace(
        b"layers.7.", b"\xc3\xa9\\n."
    )
    whole = parse_header(BytesIO(text).read, len(text), None, "it")
    monkeypatch.setattr(json_text, "WINDOW", 256)
    for piece in (1, 7, 64, 255):
        monkeypatch.setattr(json_text, "_PIECE", piece)
        assert parse_header(BytesIO(text).read, len(text), None, "it") == whole


def test_the_clock_ends_a_header_an_index_and_a_gguf_file():
    late = FROM_ELSEWHERE._replace(seconds=-1.0)
    text = header(3)
    with pytest.raises(InputError, match="not understood within"):
        parse_header(BytesIO(text).read, len(text), None, "it", late)
    with pytest.raises(InputError, match="not understood within"):
        read_shards(BytesIO(text).read, len(text), "it", late)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
    with pytest.raises(InputError, match="not understood within"):
        gguf.scan(lambda at, length: data[at : at + length], None, "it", late)


def test_the_clock_is_looked_at_within_a_long_gguf_header(monkeypatch):
    """The time is up after the first look: the texts of a vocabulary, and tensors, are not all read before the second."""
    texts = (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"a"
        + struct.pack("<IIQ", 9, 8, 100_000)
        + bytes(800_000)
    )
    row = struct.pack("<IQIQ", 1, 32, 0, 0)
    tensors = (
        b"GGUF"
        + struct.pack("<IQQ", 3, 30_000, 0)
        + b"".join(struct.pack("<Q", 5) + f"{at:05}".encode() + row for at in range(30_000))
    )
    for data in (texts, tensors):
        times = iter([0.0, 0.0, 0.0, 0.0])
        monkeypatch.setattr(gguf.time, "thread_time", lambda times=times: next(times, 100.0))
        with pytest.raises(InputError, match="not understood within"):
            gguf.scan(lambda at, length, data=data: data[at : at + length], None, "it", FROM_ELSEWHERE)


def test_gguf_keeps_few_numbers_and_no_long_text():
    array = struct.pack("<IIQ", 9, 0, 1000) + bytes(1000)
    keys = b"".join(struct.pack("<Q", 3) + f"{at:03}".encode() + array for at in range(500))
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 501) + keys + struct.pack("<QsIQ", 1, b"t", 8, 2000) + b"x" * 2000
    found = gguf.scan(lambda at, length: data[at : at + length], None, "it", FROM_ELSEWHERE).metadata
    assert sum(len(values) for values in found.values() if values is not None) <= 2**16
    assert (found["000"], found["499"], found["t"]) == ([0] * 1000, None, None)


# --- of the Hub


@pytest.fixture
def server():
    with serving() as hub:
        hub.files["config.json"] = json.dumps(CONFIG).encode()
        yield hub


@pytest.fixture
def hub(server: FakeHub, tmp_path) -> Hub:
    return Hub(server.endpoint, str(tmp_path / "cache"), seconds=8.0, stored_seconds=8.0)


def raw(text: bytes, data: int = 0) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(data)


def test_a_header_above_the_limit_is_refused_before_it_is_fetched(server, hub):
    server.files["model.safetensors"] = raw(b"{" + b" " * FROM_ELSEWHERE.bytes + b"}")
    note = find_on_hub(ID, True, hub).notes[0]
    assert "at most 16,000,000 are read" in note
    assert server.sent < 300_000


def shards(server: FakeHub, count: int) -> None:
    text = json.dumps({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]})
    names = {f"t{at}": f"{at}.safetensors" for at in range(count)}
    server.files["model.safetensors.index.json"] = json.dumps({"weight_map": names}).encode()
    for name, file in names.items():
        server.files[file] = raw(f'{{"{name}":{text}}}'.encode(), 8)


def test_the_headers_of_all_shards_share_one_limit(server, hub, monkeypatch):
    shards(server, 6)
    assert find_on_hub(ID, True, hub).stored.elements == 12
    monkeypatch.setattr(hub_weights, "_MOST_OF_ONE_MODEL", 200)
    found = find_on_hub(ID, True, hub)
    assert found.stored is None
    assert "the headers of all its files have more than 200 bytes" in found.notes[0]


def test_the_pieces_of_a_gguf_header_count_against_the_same_limit(server, hub, monkeypatch, tmp_path):
    server.files["a.gguf"] = write_gguf(tmp_path / "a.gguf", llama(), metadata=LLAMA).read_bytes()
    named = HubId("owner/name", file="a.gguf")
    assert find_on_hub(named, True, hub).stored
    monkeypatch.setattr(hub_weights, "_MOST_OF_ONE_MODEL", 200)
    with pytest.raises(InputError, match="more than 200 bytes"):
        find_on_hub(named, True, hub)


def test_one_header_is_understood_at_a_time(server, hub, monkeypatch):
    shards(server, 6)
    inside, most, lock = [], [], threading.Lock()
    original = hub_weights.parse_header

    def watched(*given):
        with lock:
            inside.append(1)
            most.append(len(inside))
        threading.Event().wait(0.01)
        try:
            return original(*given)
        finally:
            inside.pop()

    monkeypatch.setattr(hub_weights, "parse_header", watched)
    assert find_on_hub(ID, True, replace(hub, stored_seconds=30.0)).stored.elements == 12
    assert max(most) == 1
