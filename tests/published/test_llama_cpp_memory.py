"""llama.cpp's own account of its memory, asked of header-only files: weights and cache to the byte, the compute buffer nearly always."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calc.catalogue import load
from calc.serving import ServingPlan, serve

ROWS = json.loads((Path(__file__).parent / "llama_cpp_memory.json").read_text(encoding="utf-8"))["rows"]
MODELS = sorted({row["model"] for row in ROWS})


def answer_of(row):
    plan = {"engine": "llama.cpp", "weights": "gguf-F16", "kv_dtype": "fp16"} | row["plan"]
    return serve(load(row["model"]), ServingPlan(**plan))


@pytest.mark.parametrize("model", MODELS)
def test_weights_and_cache_are_exact_on_the_device_and_on_the_host(model):
    for row in (row for row in ROWS if row["model"] == model):
        answer = answer_of(row)
        assert [answer.weights_bytes, answer.kv_bytes] == row["device"][:2], row
        assert [answer.host.weights, answer.host.state] == row["host"], row


def test_the_compute_buffer_is_exact_but_for_a_quantised_cache_and_uneven_streams():
    """A quantised cache leaves the allocator other holes, and five streams share a micro-batch unevenly."""
    far = []
    for row in ROWS:
        computed, printed = answer_of(row).activation_bytes, row["device"][2]
        if computed != printed:
            assert abs(computed / printed - 1) < 0.1, row
            far.append(row["plan"].get("kv_dtype") or row["plan"]["concurrency"])
    assert len(ROWS) >= 100
    assert set(far) == {"q4_0", "q8_0", 5}
