"""llama.cpp's cells and buffers against what its logs print."""

from __future__ import annotations

import pytest

from calc.catalogue import load, load_config
from calc.errors import InputError
from calc.hardware import gpu
from calc.model.config import from_config
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


def test_a_window_has_room_for_a_micro_batch_next_to_it():
    """The log of a gpt-oss-20b: 3,072 MiB in full layers, 18 MiB in 768 cells of each sliding one."""
    rows = {row.path: row.value for row in llama_cpp("gpt-oss-20b", context=131_072).breakdown.rows()}
    assert rows["serving/state/full/keys"] + rows["serving/state/full/values"] == 3072 * MiB
    assert rows["serving/state/sliding/keys"] + rows["serving/state/sliding/values"] == 18 * MiB


@pytest.mark.parametrize(("context", "cells"), [(1, 256), (256, 256), (257, 512), (4096, 4096)])
def test_a_stream_is_padded_to_256_cells(context, cells):
    assert llama_cpp("llama-2-7b", context=context).kv_bytes_per_sequence == cells * 524_288


def test_the_compute_buffer_is_the_widest_point_of_a_micro_batch():
    """ggml-org/ci, build 4823: 162.00 MiB for pythia-2.8b at 2,048 tokens without flash attention; 300.75 MiB for a Qwen3-1.7B."""
    assert llama_cpp("pythia-2.8b", context=2048, flash_attention=False).activation_bytes == 162 * MiB + 8192
    assert llama_cpp("qwen3-1.7b", context=1024).activation_bytes == 512 * (151_936 + 2048) * 4


def test_the_input_embedding_stays_on_the_host():
    """The same log: 5049.71 MiB of weights on the GPU, 245.62 MiB on the host."""
    answer = llama_cpp("pythia-2.8b", weights="gguf-F16", context=2048)
    assert round(answer.weights_bytes / MiB, 2) == 5049.71
    assert answer.host.weights == 50_304 * 2560 * 2


def test_recurrent_states_are_in_fp32():
    """lmstudio#1862: 598.50 MiB for four sequences of this shape, and 16,384 MiB of keys and values at 65,536 tokens."""
    answer = llama_cpp("qwen3.5-27b", context=65_536, concurrency=4)
    assert 4 * answer.kv_fixed_bytes == 598.5 * MiB
    assert answer.kv_bytes == (16_384 + 598.5) * MiB
    assert_formulas_hold(answer.breakdown)


def test_auto_puts_as_many_layers_on_the_gpu_as_fit():
    card = gpu("rtx-3090-24gb")
    plan = {"engine": "llama.cpp", "weights": "gguf-Q4_K_M", "kv_dtype": "fp16", "context": 8192}
    answer = serve(load("meta-llama-3.1-70b"), ServingPlan(gpu_layers="auto", **plan), card)
    assert answer.capacity.fits
    assert 0 < answer.host.gpu_layers < 81
    more = serve(load("meta-llama-3.1-70b"), ServingPlan(gpu_layers=answer.host.gpu_layers + 1, **plan), card)
    assert more.capacity.fits is False
    assert answer.host.weights + answer.weights_bytes == more.host.weights + more.weights_bytes


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_a_format_that_llama_cpp_lacks_is_refused(name):
    with pytest.raises(InputError, match=r"llama\.cpp keeps its cache in"):
        serve(load("llama-2-7b"), ServingPlan(engine="llama.cpp", kv_dtype=name))


def test_a_unified_cache_is_one_for_all_with_a_state_and_a_window_for_each():
    """src/llama-kv-cache-iswa.cpp: the windows' cells are n_swa x n_seq_max + n_ubatch in a unified cache, one stream of them."""
    fields = {"engine": "llama.cpp", "weights": "gguf-Q4_K_M", "context": 32768, "concurrency": 4}
    spec = load("meta-llama-3.1-8b")
    own, shared = serve(spec, ServingPlan(**fields)), serve(spec, ServingPlan(**fields, kv_unified=True))
    assert own.kv_bytes == 4 * shared.kv_bytes == 4 * 32768 * 131072
    spec = load("gemma-2-9b")
    shared = serve(spec, ServingPlan(**fields, kv_unified=True))
    of_token = 8 * 256 * 2 * 2
    assert shared.kv_bytes == 21 * of_token * (32768 + 256 * -(-(4 * 4096 + 512) // 256))
    assert_formulas_hold(shared.breakdown)
    spec = load("qwen3.5-27b")
    own, shared = serve(spec, ServingPlan(**fields)), serve(spec, ServingPlan(**fields, kv_unified=True))
    grows = shared.kv_bytes_per_token * 32768
    assert own.kv_bytes - 4 * grows == shared.kv_bytes - grows
    assert_formulas_hold(shared.breakdown)


def test_llama_cpp_keeps_an_f16_cache_where_the_checkpoint_declares_fp8():
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    declared = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    spec = from_config(load_config("meta-llama-3.1-8b") | {"quantization_config": declared})
    assert serve(spec, ServingPlan(engine="vllm"), gpu("h100-sxm-80gb")).plan.kv_dtype == "fp8"
    answer = serve(spec, ServingPlan(engine="llama.cpp", weights="gguf-Q4_K_M"), gpu("rtx-4090-24gb"))
    assert answer.plan.kv_dtype == "fp16"
    assert "declares its cache in fp8, which llama.cpp does not have" in " ".join(answer.as_json()["notes"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_dtype": "fp8"}, "llama.cpp keeps its cache in"),
        ({"cache_type_v": "int8"}, "cache_type_v.*llama.cpp keeps its cache in"),
        ({"cache_type_v": "q8_0", "flash_attention": False}, "cache_type_v.*flash attention alone"),
        ({"kv_dtype": "q4_0", "flash_attention": False}, "kv_dtype.*flash attention alone"),
    ],
)
def test_caches_that_llama_cpp_refuses(fields, message):
    with pytest.raises(InputError, match=message):
        serve(load("meta-llama-3.1-8b"), ServingPlan(engine="llama.cpp", **fields), gpu("rtx-4090-24gb"))


def test_shares_must_be_as_many_as_gpus():
    with pytest.raises(ValueError, match="a number for each of pp"):
        ServingPlan(engine="llama.cpp", pp=2, tensor_split="3,1,1")
    with pytest.raises(ValueError, match="one above 0"):
        ServingPlan(engine="llama.cpp", pp=2, tensor_split="0,0")
    with pytest.raises(ValueError, match="each above 0"):
        ServingPlan(engine="llama.cpp", pp=2, gpu_memories="24,0")


def test_gpus_of_different_memory_share_the_layers_by_it_and_each_must_hold_its_own():
    """A card of 24 GiB and one of 12: of 33 layers, the output among them, the first has 22."""
    plan = {"weights": "gguf-Q8_0", "kv_dtype": "fp16", "context": 8192, "pp": 2}
    mixed = serve(
        load("meta-llama-3.1-8b"), ServingPlan(engine="llama.cpp", gpu_memories="24,12", **plan), gpu("rtx-4090-24gb")
    )
    named = serve(
        load("meta-llama-3.1-8b"), ServingPlan(engine="llama.cpp", tensor_split="24,12", **plan), gpu("rtx-4090-24gb")
    )
    assert mixed.weights_bytes == named.weights_bytes
    assert mixed.capacity.fits
    assert mixed.capacity.budget < named.capacity.budget  # 12 GiB less 1, where the other counts 24 less 1 twice
    tight = serve(
        load("meta-llama-3.1-8b"),
        ServingPlan(engine="llama.cpp", gpu_memories="24,3", tensor_split="1,1", **plan),
        gpu("rtx-4090-24gb"),
    )
    assert not tight.capacity.fits
    assert tight.capacity.limit == 2 * GiB
