"""Safetensors headers and indexes: what real files store, and every corrupt one refused in bounded time and memory."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import load, save, save_file

from calc.catalogue import load as load_spec
from calc.cli import run
from calc.errors import InputError
from calc.sources.safetensors import DTYPES, read_file, read_safetensors
from tests.calc.sources.test_hub import CONFIG, tensors
from tests.latex import assert_formulas_hold


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def row(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder: its config and one file of weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def test_every_format_of_the_library_is_read_with_its_bytes(tmp_path):
    arrays = {
        f"{dtype}{at}": np.zeros((3, at), dtype)
        for at, dtype in enumerate(("bool", "u1", "i1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8", "c8"))
    }
    save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "np"})
    found = {tensor.name: (tensor.elements, tensor.bytes) for tensor in read_file(tmp_path / "a.safetensors")}
    assert found == {name: (array.size, array.nbytes) for name, array in arrays.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_agrees_on_the_bytes_of_each_format(dtype, tmp_path):
    size, count = DTYPES[dtype]
    good = write(tmp_path / "a.safetensors", raw({"a": row(dtype, [2, 2 * count], [0, 4 * size])}, b"\0" * 4 * size))
    with safe_open(good, "np") as file:
        assert list(file.keys()) == ["a"]
    assert read_file(good)[0].elements == 4 * count
    bad = write(
        tmp_path / "b.safetensors", raw({"a": row(dtype, [2, 2 * count], [0, 4 * size + 1])}, b"\0" * (4 * size + 1))
    )
    with pytest.raises(SafetensorError):
        safe_open(bad, "np")
    with pytest.raises(InputError, match="do not take"):
        read_file(bad)


def test_a_folder_is_its_config_and_what_it_stores(folder):
    answer = json.loads(run(["params", str(folder), "--format", "json"]))
    stored = answer["stored"]
    size = sum(array.size for array in tensors().values())
    assert answer["total"] == stored["elements"] == size
    assert stored["bytes"] == 2 * size
    assert stored["by_dtype"] == {"F16": {"elements": size, "bytes": 2 * size}}
    assert list(stored["by_group"]) == ["embedding", "attention", "mlp", "norms", "head"]
    assert sum(group["bytes"] for group in stored["by_group"].values()) == stored["bytes"]
    assert sum(part["value"] for part in stored["components"]) == stored["bytes"]
    assert (stored["difference"], stored["reasons"]) == (0, [])


@pytest.mark.parametrize("form", ["table", "markdown", "csv"])
def test_every_format_answers_for_a_folder(folder, form):
    assert run(["params", str(folder), "--format", form])


def test_the_table_shows_what_is_stored_and_why_it_differs(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    table = run(["params", str(folder)])
    assert "stored minus the model's count: +256" in table
    assert "+256: the head, stored although it is tied" in table
    assert "F16" in table


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", ""])
def test_all_ways_into_a_folder_are_the_same_model(folder, name):
    spec = load_spec(str(folder / name))
    assert spec.name == folder.name
    assert spec.architecture == "LlamaForCausalLM"


def test_formulas_hold_for_what_is_stored(folder):
    stored = read_safetensors(folder / "model.safetensors")
    for unit, total in (("bytes", stored.bytes), ("parameters", stored.elements)):
        assert_formulas_hold(stored.breakdown(unit))
        assert stored.breakdown(unit).total == total


def test_a_file_without_a_config_is_counted_by_params_and_refused_by_the_others(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"model.embed_tokens.weight": np.zeros((4, 2), np.float32), "x.weight": np.zeros(3, np.float16)}, path)
    answer = json.loads(run(["params", str(path), "--format", "json"]))
    assert (answer["total"], answer["embedding"], answer["active"], answer["trainable"]) == (11, 8, None, None)
    assert answer["stored"]["bytes"] == 38
    assert "has no config.json next to it" in answer["notes"][0]
    assert "counted from the stored tensors alone" in run(["params", str(path)])
    for command in ("train", "serve", "compute"):
        with pytest.raises(InputError, match=r"has no config\.json next to it"):
            run([command, str(path)])


def test_an_unsupported_class_is_refused_by_name_for_a_folder_and_counted_for_a_file(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["NoSuchForCausalLM"]}))
    with pytest.raises(InputError, match="'NoSuchForCausalLM' is not understood"):
        run(["params", str(folder)])
    assert "'NoSuchForCausalLM' is not understood" in run(["params", str(folder / "model.safetensors")])


# --- the index and its shards


def shard(folder: Path, count: int = 3) -> Path:
    everything = tensors()
    weight_map = {name: f"model-{at % count + 1:05}-of-{count:05}.safetensors" for at, name in enumerate(everything)}
    for file in set(weight_map.values()):
        save_file({name: everything[name] for name in everything if weight_map[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1.5e3}, "weight_map": weight_map}))
    return index


def test_an_index_counts_all_its_shards_once(folder):
    whole = read_safetensors(folder / "model.safetensors")
    index = shard(folder)
    stored = read_safetensors(index)
    assert sorted(stored.tensors) == sorted(whole.tensors)
    answer = json.loads(run(["params", str(index), "--format", "json"]))
    assert (answer["model"], answer["stored"]["difference"]) == (folder.name, 0)
    (folder / "model.safetensors").unlink()
    assert json.loads(run(["params", str(folder), "--format", "json"]))["stored"]["difference"] == 0


def test_one_shard_says_that_it_is_one(folder):
    shard(folder)
    answer = json.loads(run(["params", str(folder / "model-00001-of-00003.safetensors"), "--format", "json"]))
    assert "is one shard of several" in answer["notes"][0]
    assert "not explained; the file may be one shard" in answer["stored"]["reasons"][-1]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "must be the name of a .safetensors file in the folder"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "must be the name of a .safetensors file in the folder"),
        ({"weight_map": {"a": 3}}, "must be the name of a .safetensors file in the folder"),
        ({"weight_map": {"not.there": "model.safetensors"}}, "which does not hold it"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": []}, "has no weight_map"),
        ({}, "has no weight_map"),
        ([], "does not begin with {"),
        ({"weight_map": {str(at): f"{at}.safetensors" for at in range(5000)}}, "at most 4,096 are read"),
    ],
)
def test_a_wrong_index_is_refused(folder, index, words):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=words):
        run(["params", str(path)])


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"w": np.zeros(1, np.float32), name: np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "b": "b.safetensors"}}))
    with pytest.raises(InputError, match="'w' is stored in two shards"):
        read_safetensors(index)


# --- corrupt headers

CORRUPT = {
    "empty": b"",
    "seven bytes": b"\1" * 7,
    "length past the end": raw({}, length=5000),
    "huge length": raw({}, length=2**63),
    "above the format's limit": raw({}, length=100_000_001),
    "no length": raw({}, length=0),
    "no JSON": raw(b"{nothing}"),
    "a list": raw([1]),
    "half a text": raw(b'{"a'),
    "not UTF-8": raw(b'{"\xff": 1}'),
    "NaN": raw(b'{"a": NaN}'),
    "deep": raw(b'{"a":' + b"[" * 100_000),
    "deep objects": raw(b'{"a":' * 200_000),
    "many objects": raw(b"{" + b'"a":{},' * 1_100_000 + b'"b":{}}'),
    "many numbers": raw(b'{"a":[' + b"1," * 13_000_000 + b"1]}"),
    "long number": raw(b'{"a":' + b"9" * 5000 + b"}"),
    "a text for a tensor": raw({"a": "b"}),
    "no fields": raw({"a": {}}),
    "unknown dtype": raw({"a": row("F7")}, b"\0" * 8),
    "dtype a list": raw({"a": row(["F32"])}, b"\0" * 8),
    "negative offsets": raw({"a": row(offsets=[-8, 0])}, b"\0" * 8),
    "offsets backwards": raw({"a": row(offsets=[8, 0])}, b"\0" * 8),
    "three offsets": raw({"a": row(offsets=[0, 8, 16])}, b"\0" * 8),
    "offsets of floats": raw({"a": row(offsets=[0.0, 8.0])}, b"\0" * 8),
    "negative shape": raw({"a": row(shape=[-2])}, b"\0" * 8),
    "boolean shape": raw({"a": row(shape=[True, 2])}, b"\0" * 8),
    "shape a number": raw({"a": row(shape=2)}, b"\0" * 8),
    "huge shape": raw({"a": row(shape=[2**60] * 64)}, b"\0" * 8),
    "wrong size": raw({"a": row(shape=[3])}, b"\0" * 8),
    "overlap": raw({"a": row(), "b": row(offsets=[4, 12])}, b"\0" * 12),
    "hole": raw({"a": row(), "b": row(offsets=[12, 20])}, b"\0" * 20),
    "starts late": raw({"a": row(offsets=[4, 12])}, b"\0" * 12),
    "truncated": raw({"a": row()}, b"\0" * 7),
    "goes on": raw({"a": row()}, b"\0" * 9),
    "metadata a list": raw({"__metadata__": [], "a": row()}, b"\0" * 8),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_file_is_refused_with_one_line_in_bounded_time_and_memory(name, tmp_path):
    path = write(tmp_path / "bad.safetensors", CORRUPT[name])
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            read_file(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "bad.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert peak < 400e6
    assert time.monotonic() - start < 20
    with pytest.raises(InputError):
        run(["params", str(path)])


@pytest.mark.parametrize("name", [name for name, data in CORRUPT.items() if len(data) < 1_000_000])
def test_the_library_refuses_the_same_files(name):
    with pytest.raises((SafetensorError, OverflowError, ValueError)):
        load(CORRUPT[name])


@given(st.data())
def test_a_changed_byte_never_gives_an_answer_that_the_library_does_not(tmp_path_factory, data):
    good = save({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)})
    at = data.draw(st.integers(0, len(good) - 1))
    bad = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    path = write(tmp_path_factory.mktemp("bytes") / "a.safetensors", bad)
    try:
        found = {tensor.name: tensor.bytes for tensor in read_file(path)}
    except InputError:
        return
    assert found == {name: len(tensor["data"]) for name, tensor in deserialize(bad)}


def test_links_that_loop_devices_pipes_and_folders_are_refused(tmp_path):
    loop = tmp_path / "loop.safetensors"
    loop.symlink_to(loop)
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    (tmp_path / "folder.safetensors").mkdir()
    device = tmp_path / "device.safetensors"
    device.symlink_to("/dev/zero")
    for path in (loop, pipe, tmp_path / "folder.safetensors", device, tmp_path / "absent.safetensors"):
        for command in ("params", "train"):
            with pytest.raises(InputError, match=r"must be a plain file|cannot be read"):
                run([command, str(path)])


def test_a_link_to_a_file_is_followed(folder, tmp_path_factory):
    link = tmp_path_factory.mktemp("link") / "model.safetensors"
    link.symlink_to(folder / "model.safetensors")
    assert read_safetensors(link).elements == read_safetensors(folder / "model.safetensors").elements


@pytest.mark.parametrize("model", ["a\0b", "~nobodyhere/x", "x" * 5000, "./" + "y" * 300, "no such model", "a b/c"])
def test_what_is_no_model_is_one_line(model):
    with pytest.raises(InputError) as caught:
        run(["params", model])
    assert str(caught.value).startswith("MODEL")
