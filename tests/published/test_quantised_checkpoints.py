"""Stored bytes of published quantised checkpoints: equal to the tensors' total, or within 0.1 % where only a file's size is published.

`quantised_checkpoints.json` has the source of each; `declared` is what the config says of its format beside the catalogue's config
of the same model, and `beside` counts buffers that a checkpoint holds and its class does not count, as its note says.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from calc.catalogue import load_config
from calc.model.config import from_config
from calc.parameters import parameters

ROWS = json.loads((Path(__file__).parent / "quantised_checkpoints.json").read_text(encoding="utf-8"))


def config_of(row):
    config = dict(row["config"]) if "config" in row else load_config(row["catalogue"])
    return {**config, **row.get("declared", {})}


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_stored_bytes_are_those_of_the_published_checkpoint(row):
    found = parameters(from_config(config_of(row))).stored_bytes + row.get("beside", 0)
    if "relative" in row:
        assert found == pytest.approx(row["bytes"], rel=row["relative"])
    else:
        assert found == row["bytes"]


def test_at_least_25_repositories_over_the_formats():
    assert len(ROWS) >= 25
    assert len(Counter(row["format"] for row in ROWS)) >= 6
    assert sum("relative" not in row for row in ROWS) >= 20


def test_deepseek_v3s_fp8_files_are_the_class_and_its_prediction_layer():
    """688,586,727,753 bytes of files (deepseek-ai/DeepSeek-V3, 163 shards): the class, and one more expert layer with an embedding and a
    head of its own, a 16-bit projection of 2 h x h and two norms. Headers of 92,000 tensors take the rest."""
    config = load_config("deepseek-v3")
    assert config["quantization_config"]["quant_method"] == "fp8"
    whole = parameters(from_config(config)).stored_bytes
    one = parameters(from_config({**config, "num_hidden_layers": 1, "first_k_dense_replace": 0})).stored_bytes
    width = config["hidden_size"]
    found = whole + one + 2 * (2 * width * width + 2 * width)
    assert 0 < 688_586_727_753 - found < 163 * 150_000


TOOLS = json.loads((Path(__file__).parent / "quantizer_bytes.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", TOOLS["rows"], ids=[row["name"] for row in TOOLS["rows"]])
def test_stored_bytes_are_those_that_the_tools_own_quantizer_saves(row):
    """bitsandbytes, transformers, compressed-tensors, torchao and HQQ, each of which wrote the declaration too. `beside` are the bytes of
    what describes a layer in text, which is no tensor of the model."""
    config = {"architectures": ["LlamaForCausalLM"], **TOOLS["shape"], "dtype": "bfloat16"}
    answer = parameters(from_config({**config, "quantization_config": row["declared"]}))
    assert answer.stored_bytes + row.get("beside", 0) == row["bytes"]


@pytest.mark.parametrize(("name", "bits"), [("hqq 3 bits 64", 3), ("compressed-tensors W4A16", 4)])
def test_a_formats_bits_are_those_of_one_value(name, bits):
    declared = next(row["declared"] for row in TOOLS["rows"] if row["name"] == name)
    spec = from_config({"architectures": ["LlamaForCausalLM"], **TOOLS["shape"], "quantization_config": declared})
    assert spec.quantization is not None
    assert spec.quantization.scheme.bits == bits
