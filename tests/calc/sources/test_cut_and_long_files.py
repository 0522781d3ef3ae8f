"""A GGUF file that is a byte short, and a download that is longer than it may be."""

import gguf
import pytest

from calc.errors import InputError
from calc.sources.gguf import scan
from calc.sources.hub import Hub, HubId, fetch
from tests.calc.sources.gguf_files import write_gguf
from tests.calc.sources.hub_server import serving
from tests.calc.sources.test_gguf import LLAMA, llama


def test_a_gguf_file_is_whole_with_its_last_tensors_last_byte(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", llama(), metadata=LLAMA)
    data = path.read_bytes()
    end = max(
        tensor.data_offset + tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors
    )  # by the package's own reader
    assert scan(lambda at, length: data[at : at + length], end, "a.gguf").tensors
    with pytest.raises(InputError, match=f"end at byte {end:,} and it has {end - 1:,}: it is truncated"):
        scan(lambda at, length: data[at : at + length], end - 1, "a.gguf")


def test_a_gguf_file_cut_within_any_part_of_its_header_is_refused(tmp_path):
    data = write_gguf(tmp_path / "a.gguf", llama(), metadata=LLAMA, tokens=3).read_bytes()
    end = data.rindex(b"blk.1.ffn_norm.weight") + 40
    for cut in range(4, end, 37):
        with pytest.raises(InputError, match="truncated"):
            scan(lambda at, length, cut=cut: data[at : min(at + length, cut)], cut, "a.gguf")


def test_a_download_twice_as_long_as_allowed_ends_where_it_is_too_long(tmp_path):
    """30 MB come where the server promised few bytes; 20 MB are allowed."""
    with serving() as server:
        server.files["config.json"] = b"{}"
        server.mode["config.json"] = "liar"
        hub = Hub(server.endpoint, str(tmp_path / "cache"), seconds=60.0)
        with pytest.raises(InputError, match="larger than its size says"):
            fetch(HubId("owner/name"), "config.json", 20_000_000, hub)
