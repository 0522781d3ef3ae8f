"""MLX's own caches and parameters, of tiny models that mlx-lm ran: to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calc.catalogue import load
from calc.errors import InputError
from calc.hardware import gpu
from calc.model.config import from_config
from calc.serving import ServingPlan, serve
from tests.latex import assert_formulas_hold

RECORD = json.loads((Path(__file__).parent / "mlx_memory.json").read_text(encoding="utf-8"))
SPECS = {name: from_config(config) for name, config in RECORD["configs"].items()}


@pytest.mark.parametrize(("model", "context", "kept", "expected"), RECORD["caches"])
def test_the_cache_is_the_one_that_mlx_held(model, context, kept, expected):
    answer = serve(SPECS[model], ServingPlan(engine="mlx", context=context, kv_dtype=kept))
    assert answer.kv_bytes == expected
    assert_formulas_hold(answer.breakdown)


@pytest.mark.parametrize(("model", "weights", "expected"), RECORD["weights"])
def test_the_weights_are_those_that_mlx_held(model, weights, expected):
    assert serve(SPECS[model], ServingPlan(engine="mlx", weights=weights)).weights_bytes == expected


def test_the_limit_is_the_working_set_and_windows_hold_a_chunk_of_the_prompt():
    card = gpu("apple-m1-max-64gb")
    answer = serve(load("gemma-3-27b-it"), ServingPlan(engine="mlx", weights="mlx-int4", context=32768), card)
    assert answer.capacity.limit == card.memory_bytes * 3 // 4
    parts = {row.path: row.value for row in answer.breakdown.rows()}
    assert parts["serving/activations/window_chunks"] == 52 * 16 * 128 * 2 * 2 * 2047


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 2}, "one machine"),
        ({"kv_dtype": "fp8"}, "MLX keeps its cache in"),
        ({"kv_dtype": "int8"}, "does not quantise the cache of windows"),
    ],
)
def test_what_mlx_does_not_do_is_named(fields, message):
    with pytest.raises(InputError, match=message):
        serve(SPECS["gemma3"], ServingPlan(engine="mlx", **fields))
