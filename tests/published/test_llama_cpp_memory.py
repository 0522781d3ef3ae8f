"""llama.cpp's own account of its memory, asked of header-only files: weights and cache to the byte, the compute buffer nearly always."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calc.catalogue import load
from calc.serving import ServingPlan, serve
from calc.serving.cache import cache_of
from calc.serving.llama_cpp import buffers, host_memory, place
from calc.serving.stages import loads
from calc.serving.weights import stored_weights

RECORD = json.loads((Path(__file__).parent / "llama_cpp_memory.json").read_text(encoding="utf-8"))
ROWS, OPTIONS = (
    RECORD["rows"],
    RECORD["options"],
)  # one device; shares of several, two formats of a cache, experts on the host
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


def devices_of(row):
    """(weights, cache, compute buffer) of each device, and (weights, cache) of the host."""
    plan = ServingPlan(**{"engine": "llama.cpp", "weights": "gguf-F16", "kv_dtype": "fp16", **row["plan"]})
    spec = load(row["model"])
    stored = stored_weights(spec, plan.weights, 1)
    cache = cache_of(spec, plan)
    placement = place(spec, plan, None, stored, cache)
    stages = loads(spec, plan, None, stored, cache, buffers, placement)
    host = host_memory(spec, plan, stored, cache, placement)
    return [[each.weights, each.sequence, each.activation_bytes] for each in stages], [host.weights, host.state]


@pytest.mark.parametrize("model", sorted({row["model"] for row in OPTIONS}))
def test_layers_go_to_the_gpus_and_experts_to_the_host_as_llama_cpp_puts_them(model):
    for row in (row for row in OPTIONS if row["model"] == model):
        devices, host = devices_of(row)
        assert [device[:2] for device in devices] == [device[:2] for device in row["devices"]], row["plan"]
        assert host == row["host"], row["plan"]


def test_the_compute_buffer_of_each_gpu_is_exact_but_for_four_kinds():
    """Scores kept next to copies, part of a model on several GPUs, keys in blocks, and a GPU whose experts are on the host."""
    kinds = set()
    for row in OPTIONS:
        for mine, theirs in zip(devices_of(row)[0], row["devices"], strict=True):
            if mine[2] != theirs[2]:
                assert abs(mine[2] / theirs[2] - 1) < 0.1, row
                kinds.add(next(name for name in row["plan"] if name not in ("context", "pp")))
    assert len(OPTIONS) >= 90
    assert kinds == {"flash_attention", "gpu_layers", "cache_type_k", "n_cpu_moe"}
