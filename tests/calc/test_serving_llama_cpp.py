"""llama.cpp's cells and buffers against what its logs print."""

from __future__ import annotations

import pytest

from calc.catalogue import load
from calc.errors import InputError
from calc.serving import ServingPlan, serve
from calc.units import GiB, MiB
from tests.latex import assert_formulas_hold


def llama_cpp(name, **plan):
    return serve(load(name), ServingPlan(engine="llama.cpp", kv_dtype="fp16", **plan))


@pytest.mark.parametrize(("name", "gib"), [("gemma-3-27b-it", 10.609), ("gpt-oss-20b", 3.018)])
def test_the_whole_cache_at_131072_tokens(name, gib):
    answer = llama_cpp(name, context=131_072)
    assert round(answer.kv_bytes_per_sequence / GiB, 3) == gib
    assert_formulas_hold(answer.breakdown)


def test_a_window_has_room_for_a_micro_batch_beside_it():
    """The log of a gpt-oss-20b: 3,072 MiB in full layers, 18 MiB in 768 cells of each sliding one."""
    rows = {row.path: row.value for row in llama_cpp("gpt-oss-20b", context=131_072).breakdown.rows()}
    assert rows["serving/state/full/keys"] + rows["serving/state/full/values"] == 3072 * MiB
    assert rows["serving/state/sliding/keys"] + rows["serving/state/sliding/values"] == 18 * MiB


@pytest.mark.parametrize(("context", "cells"), [(1, 256), (256, 256), (257, 512), (4096, 4096)])
def test_a_stream_is_padded_to_256_cells(context, cells):
    assert llama_cpp("llama-2-7b", context=context).kv_bytes_per_sequence == cells * 524_288


def test_the_compute_buffer_is_the_logits_of_a_micro_batch():
    assert llama_cpp("llama-2-7b").activation_bytes == 512 * 32_000 * 4


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_a_format_that_llama_cpp_lacks_is_refused(name):
    with pytest.raises(InputError, match=r"llama\.cpp keeps its cache in"):
        serve(load("llama-2-7b"), ServingPlan(engine="llama.cpp", kv_dtype=name))
