"""GGUF headers: against the gguf package's own reader and writer, and against the classes that files were converted from."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from calc.catalogue import load, load_config
from calc.cli import run
from calc.errors import InputError
from calc.parameters import parameters
from calc.serving.formats import GGML_BLOCKS
from calc.sources.gguf import ggml_types, read_gguf, scan, stored_gguf
from calc.sources.hub import Hub, HubId
from calc.sources.hub_weights import find_on_hub
from calc.sources.stored import HeaderLimit
from tests.calc.sources.gguf_files import converted, write_gguf
from tests.calc.sources.hub_server import COMMIT, serving
from tests.latex import assert_formulas_hold

F32, F16, Q4_K, Q6_K = (GGMLQuantizationType[name] for name in ("F32", "F16", "Q4_K", "Q6_K"))
LLAMA = {
    "llama.context_length": 128,
    "llama.embedding_length": 256,
    "llama.block_count": 2,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def llama(kind=Q4_K, tied: bool = False, extra=()) -> list[tuple]:
    """The tensors of a llama of two layers; norms stay F32."""
    rows = [("token_embd.weight", (96, 256), kind), ("output_norm.weight", (256,), F32)]
    rows += [] if tied else [("output.weight", (96, 256), Q6_K)]
    for layer in ("blk.0.", "blk.1."):
        for name, size in (("attn_q", 256), ("attn_k", 128), ("attn_v", 128), ("attn_output", 256)):
            rows.append((f"{layer}{name}.weight", (size, 256), kind))
        rows += [(f"{layer}ffn_{name}.weight", (512, 256), kind) for name in ("gate", "up")]
        rows += [(f"{layer}ffn_down.weight", (256, 512), kind)]
        rows += [(f"{layer}{name}_norm.weight", (256,), F32) for name in ("attn", "ffn")]
    return [*rows, *extra]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", llama(), metadata=LLAMA, tokens=96)


def test_the_blocks_that_serving_knows_are_the_packages():
    known = {name: (size, count) for name, size, count in ggml_types().values()}
    assert {name: known[name] for name in GGML_BLOCKS} == GGML_BLOCKS


@pytest.mark.parametrize("kind", GGML_QUANT_SIZES, ids=lambda kind: kind.name)
def test_every_type_is_read_as_the_packages_reader_reads_it(kind, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", [("a.weight", (3, 512), kind), ("b.weight", (2, 256), kind)])
    theirs = {
        tensor.name: (tensor.tensor_type.name, tensor.n_elements, tensor.n_bytes)
        for tensor in gguf.GGUFReader(path).tensors
    }
    assert {tensor.name: tuple(tensor[1:]) for tensor in read_gguf(path).tensors} == theirs


def test_metadata_and_shapes_are_the_readers(path):
    header, reader = read_gguf(path), gguf.GGUFReader(path)
    for key, value in header.metadata.items():
        field = reader.fields[key]
        if value is not None:
            assert value == field.contents(), key
    assert set(header.metadata) == {key for key in reader.fields if not key.startswith("GGUF.")}
    assert header.shapes == {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in reader.tensors}


def test_a_file_of_the_other_byte_order_is_the_same(path, tmp_path):
    big = write_gguf(tmp_path / "big.gguf", llama(), metadata=LLAMA, tokens=96, endianess=gguf.GGUFEndian.BIG)
    assert read_gguf(big).tensors == read_gguf(path).tensors


def test_params_shows_exact_bytes_by_type_next_to_the_exact_count(path):
    answer = json.loads(run(["params", str(path), "--format", "json"]))
    stored = answer["stored"]
    linear = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    assert answer["total"] == stored["elements"] == linear + 2 * 96 * 256 + 5 * 256
    assert (stored["difference"], stored["reasons"]) == (0, [])
    assert stored["by_dtype"] == {
        "Q4_K": {"elements": linear + 96 * 256, "bytes": (linear + 96 * 256) // 256 * 144},
        "Q6_K": {"elements": 96 * 256, "bytes": 96 * 210},
        "F32": {"elements": 5 * 256, "bytes": 5 * 256 * 4},
    }
    assert sum(row["bytes"] for row in stored["by_group"].values()) == stored["bytes"]
    assert answer["assumptions"][0] == "config read from the metadata of tiny.gguf"
    assert_formulas_hold(stored_gguf(read_gguf(path), "tiny.gguf").breakdown())


@pytest.mark.parametrize("command", ["train", "serve", "compute"])
def test_the_other_questions_take_a_gguf_file(path, command):
    assert json.loads(run([command, str(path), "--format", "json"]))["model"] == "tiny"


def test_a_tied_head_and_rope_factors_are_told(tmp_path):
    factors = [("rope_freqs.weight", (32,), F32)]
    path = write_gguf(tmp_path / "tied.gguf", llama(tied=True, extra=factors), metadata=LLAMA)
    answer = json.loads(run(["params", str(path), "--format", "json"]))
    assert answer["tied"] is True
    assert answer["stored"]["difference"] == 32
    assert answer["stored"]["reasons"][0].startswith("+32: buffers")


def test_an_unknown_architecture_is_counted_by_params_and_refused_by_name_by_the_others(tmp_path):
    path = write_gguf(tmp_path / "new.gguf", llama(), arch="rwkv6")
    answer = json.loads(run(["params", str(path), "--format", "json"]))
    assert answer["total"] == answer["stored"]["elements"]
    assert answer["active"] is None
    assert "general.architecture: 'rwkv6' is not allowed" in answer["notes"][0]
    with pytest.raises(InputError, match=r"general\.architecture: 'rwkv6'"):
        run(["train", str(path)])


def test_metadata_that_does_not_describe_the_tensors_is_refused(tmp_path):
    path = write_gguf(tmp_path / "odd.gguf", llama(), metadata=LLAMA | {"llama.feed_forward_length": 511})
    with pytest.raises(InputError, match="so it is another model"):
        load(str(path))
    assert "so it is another model" in run(["params", str(path)])


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count"])
def test_a_missing_key_is_named(tmp_path, key):
    metadata = {name: value for name, value in LLAMA.items() if name != f"llama.{key}"}
    path = write_gguf(tmp_path / "odd.gguf", llama(), metadata=metadata)
    with pytest.raises(InputError, match=f"llama.{key}: missing"):
        load_config(str(path))


def test_splits_count_as_one_file(tmp_path):
    rows = llama()
    names = [tmp_path / f"tiny-{at:05}-of-00002.gguf" for at in (1, 2)]
    for at, (name, part) in enumerate(zip(names, (rows[:7], rows[7:]), strict=True)):
        write_gguf(name, part, metadata=LLAMA | {"split.count": 2, "split.no": at})
    answer = json.loads(run(["params", str(names[0]), "--format", "json"]))
    assert answer["stored"]["difference"] == 0
    with pytest.raises(InputError, match="is split 1 of 2; give the first one"):
        run(["params", str(names[1])])
    names[1].unlink()
    with pytest.raises(InputError, match="No such file"):
        run(["params", str(names[0])])


@pytest.mark.slow
def test_a_large_vocabulary_takes_little_memory(tmp_path):
    path = write_gguf(tmp_path / "vocabulary.gguf", llama(), metadata=LLAMA, tokens=200_000)
    tracemalloc.start()
    assert len(read_gguf(path).tensors) == len(llama())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64e6


def test_a_sparse_file_of_full_length_reads_its_header_alone(tmp_path):
    small = write_gguf(tmp_path / "a.gguf", llama(), metadata=LLAMA)
    data, sparse = small.read_bytes()[:8192], tmp_path / "sparse.gguf"
    with sparse.open("wb") as file:
        file.write(data)
        file.truncate(2**40)
    assert read_gguf(sparse) == read_gguf(small)


# --- the classes that files are converted from


def _tiny(name: str, **options):
    import transformers

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    return getattr(transformers, name)(**{**sizes, **options})


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
CLASSES = [
    ("llama", "LlamaConfig", "LlamaForCausalLM", {}),
    ("llama", "LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 32}),
    ("llama", "LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "MixtralConfig", "MixtralForCausalLM", LOCAL),
    ("qwen2", "Qwen2Config", "Qwen2ForCausalLM", {}),
    ("qwen2moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", MOE | {"shared_expert_intermediate_size": 80}),
    ("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    ("qwen3moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", MOE | {"head_dim": 32}),
    ("gemma", "GemmaConfig", "GemmaForCausalLM", {"head_dim": 32}),
    ("gemma2", "Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 32, "sliding_window": 128}),
    ("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 32, "sliding_window": 128}),
    ("phi3", "Phi3Config", "Phi3ForCausalLM", {}),
    ("olmo2", "Olmo2Config", "Olmo2ForCausalLM", {}),
    ("gpt-oss", "GptOssConfig", "GptOssForCausalLM", LOCAL | {"head_dim": 32, "sliding_window": 128}),
]


@pytest.mark.torch
@pytest.mark.parametrize(("arch", "config_name", "model_name", "options"), CLASSES)
def test_a_converted_model_is_read_back_as_its_class(arch, config_name, model_name, options, tmp_path):
    import torch
    import transformers

    from calc.model.config import from_config

    config = _tiny(config_name, **options)
    with torch.device("meta"):
        model = getattr(transformers, model_name)(config)
    tensors, metadata = converted(config, arch, model)
    path = write_gguf(tmp_path / "model.gguf", tensors, arch, metadata)
    spec = load(str(path))
    original = from_config({**config.to_dict(), "architectures": [model_name]})
    assert spec.architecture == model_name
    assert load_config(str(path))["model_type"] == config.model_type
    assert parameters(spec).total == sum(parameter.numel() for parameter in model.parameters())
    assert spec.layers.pattern == original.layers.pattern
    assert [kind.mixer for kind in spec.layers.kinds] == [kind.mixer for kind in original.layers.kinds]
    assert [kind.feed_forward for kind in spec.layers.kinds] == [kind.feed_forward for kind in original.layers.kinds]
    assert spec.max_position_embeddings == original.max_position_embeddings


# --- corrupt headers


def text(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def raw(
    keys: list[bytes] = (), rows: list[bytes] = (), version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    count, kv = counts or (len(rows), len(keys))
    return b"GGUF" + struct.pack("<IQQ", version, count, kv) + b"".join(keys) + b"".join(rows)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes | str = "a", sizes=(32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


BODY = b"\0" * 4096
HUGE = 2**62
CORRUPT = {
    "empty": b"",
    "another format": b"PK\3\4" + BODY,
    "magic alone": b"GGUF",
    "version 1": raw(version=1) + BODY,
    "version 99": raw(version=99) + BODY,
    "ends in its header": raw([key("a", 4, b"\0" * 4)], counts=(0, 9)),
    "huge tensor count": raw(counts=(HUGE, 0)) + BODY,
    "huge key count": raw(counts=(0, HUGE)) + BODY,
    "huge key": struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, HUGE) + BODY,
    "huge text": raw([key("a", 8, struct.pack("<Q", HUGE))]) + BODY,
    "huge array": raw([key("a", 9, struct.pack("<IQ", 0, HUGE))]) + BODY,
    "huge array of texts": raw([key("a", 9, struct.pack("<IQ", 8, HUGE))]) + BODY,
    "long array of texts": raw([key("a", 9, struct.pack("<IQ", 8, 8_000_000))]) + BODY,
    "array of arrays": raw([key("a", 9, struct.pack("<IQ", 9, 1))]) + BODY,
    "unknown type of value": raw([key("a", 13, BODY)]),
    "key twice": raw([key("a", 0, b"\0"), key("a", 0, b"\0")]) + BODY,
    "key not UTF-8": raw([text(b"\xff") + struct.pack("<I", 0) + b"\0"]) + BODY,
    "name too long": raw(rows=[tensor("a" * 300)]) + BODY,
    "tensor twice": raw(rows=[tensor(), tensor(offset=128)]) + BODY,
    "many dimensions": raw(rows=[tensor(sizes=(1,) * 9)]) + BODY,
    "huge dimensions": raw(rows=[text("a") + struct.pack("<I", 2**32 - 1)]) + BODY,
    "huge tensor": raw(rows=[tensor(sizes=(HUGE, HUGE))]) + BODY,
    "unknown type": raw(rows=[tensor(kind=4)]) + BODY,
    "part of a block": raw(rows=[tensor(kind=2, sizes=(33,))]) + BODY,
    "overlap": raw(rows=[tensor(), tensor("b", offset=64)]) + BODY,
    "out of line": raw(rows=[tensor(offset=1)]) + BODY,
    "offset past the end": raw(rows=[tensor(offset=HUGE)]) + BODY,
    "truncated": raw(rows=[tensor(sizes=(4096,))]) + BODY,
    "no alignment": raw([key("general.alignment", 4, struct.pack("<I", 0))], [tensor()]) + BODY,
    "odd alignment": raw([key("general.alignment", 4, struct.pack("<I", 48))], [tensor()]) + BODY,
    "alignment a text": raw([key("general.alignment", 8, text("32"))], [tensor()]) + BODY,
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_file_is_refused_with_one_line_in_bounded_time_and_memory(name, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(CORRUPT[name])
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "bad.gguf" in str(caught.value)
    assert len(str(caught.value)) < 400
    assert peak < 70e6
    assert time.monotonic() - start < 5
    with pytest.raises(InputError):
        run(["params", str(path)])


def test_a_corrupt_length_in_a_file_without_end_stops_at_the_limit():
    head = raw([key("a", 9, struct.pack("<IQ", 8, 500_000))])
    endless = head + bytes([1]) * 2**23
    with pytest.raises(InputError, match="leads past 4,194,304 bytes"):
        scan(lambda offset, length: endless[offset : offset + length], None, "endless.gguf", HeaderLimit(2**22, 60.0))


def test_a_header_is_as_good_as_refused_or_read_when_any_byte_changes(path):
    data = path.read_bytes()
    size = len(data)
    good = scan(lambda offset, length: data[offset : offset + length], size, "a.gguf")

    @given(st.integers(0, 6000), st.integers(0, 255))
    def change(at: int, value: int) -> None:
        bad = data[:at] + bytes([value]) + data[at + 1 :]
        try:
            header = scan(lambda offset, length: bad[offset : offset + length], size, "a.gguf")
        except InputError:
            return
        assert all(tensor.bytes <= size for tensor in header.tensors)
        assert len(header.tensors) <= len(good.tensors)

    change()


# --- from the Hub, by range requests


def test_a_gguf_file_of_the_hub_is_read_from_its_header(tmp_path):
    path = write_gguf(tmp_path / "big.gguf", llama(F16), metadata=LLAMA, tokens=20_000)
    with serving() as server:
        server.files["sub/big.gguf"] = path.read_bytes() + bytes(20_000_000)
        hub = Hub(server.endpoint, str(tmp_path / "cache"), seconds=8.0, stored_seconds=8.0)
        found = find_on_hub(HubId("owner/name", file="sub/big.gguf"), True, hub)
        spec = found.spec()
        assert f"revision {COMMIT}" in spec.assumptions[0]
        assert found.stored.tensors == read_gguf(path).tensors
        assert server.sent < 3_000_000
        server.mode["sub/big.gguf"] = 404
        with pytest.raises(InputError, match="no such model"):
            find_on_hub(HubId("owner/name", file="sub/big.gguf"), True, hub)
