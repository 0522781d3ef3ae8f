"""SGLang, TensorRT-LLM, transformers' generate and Apple's machines: their rules, each against its worked example."""

from __future__ import annotations

import pytest

from calc.breakdown import Breakdown, Component
from calc.catalogue import load, load_config
from calc.errors import InputError
from calc.hardware import gpu
from calc.model.config import from_config
from calc.serving import ServingPlan, serve
from calc.serving.sglang import defaults, mem_fraction_static
from calc.units import GiB, MiB
from tests.latex import assert_formulas_hold

ENGINES = ("sglang", "tensorrt-llm", "transformers")


def on(engine: str, model: str = "meta-llama-3.1-8b", card: str = "h100-sxm-80gb", **plan):
    return serve(load(model), ServingPlan(engine=engine, **plan), gpu(card))


@pytest.mark.parametrize(("card", "tp", "chunk", "sequences"), [
    ("t4-16gb", 1, 2048, 8), ("rtx-4090-24gb", 1, 4096, 48), ("a100-pcie-40gb", 4, 4096, 160),
    ("h100-sxm-80gb", 1, 8192, 256), ("h200-141gb", 8, 8192, 512), ("b200-180gb", 1, 16_384, 512),
])  # fmt: skip
def test_sglang_sizes_chunk_and_graphs_by_the_card(card, tp, chunk, sequences):
    assert defaults(ServingPlan(engine="sglang", tp=tp), gpu(card)) == (chunk, sequences)


def test_sglangs_fraction_is_what_its_reserve_leaves():
    """H100, 81,008 MiB: 512 + 1.5 x 8,192 + 1 / 8 x 1,024 + 2 x 256 + 8 MiB for each of 58 prefill graphs."""
    card = gpu("h100-sxm-80gb")
    memory = card.memory_bytes // MiB
    reserved = 512 + 1.5 * 8192 + 128 + 512 + 8 * 58
    assert mem_fraction_static(load("meta-llama-3.1-8b"), ServingPlan(engine="sglang"), card) == round(
        (memory - reserved) / memory, 3
    )
    small = mem_fraction_static(load("meta-llama-3.1-8b"), ServingPlan(engine="sglang", max_batched_tokens=2048), card)
    assert small == round((memory - 10 * 1024) / memory, 3)  # never less than 10 GiB above 60


def test_sglangs_tokens_are_its_budget_over_the_bytes_of_a_token():
    answer = on("sglang", mem_fraction_static=0.88, block_size=1)
    assert answer.capacity.tokens == answer.capacity.budget // 131_072
    share = int(answer.gpu.memory_bytes * 0.88) - answer.weights_bytes
    assert 0 < share - answer.capacity.budget < GiB  # less what CUDA held before


def test_a_sliding_pool_has_eight_tokens_for_ten_of_the_full_one():
    answer = on("sglang", "gpt-oss-20b", weights="mxfp4", kv_memory_gib=10, block_size=1)
    full = sliding = 12 * 2 * 8 * 64 * 2
    assert answer.capacity.tokens == int(10 * GiB / (full + 0.8 * sliding))


def test_tensorrt_llm_takes_nine_tenths_of_what_is_free():
    answer = on("tensorrt-llm")
    context = answer.reserved[0].total
    free = answer.gpu.memory_bytes - answer.weights_bytes - answer.activation_bytes - context
    assert abs(answer.capacity.budget - free * 9 // 10) <= 1
    assert on("tensorrt-llm", max_tokens=1000).capacity.tokens == 1000


def test_generate_holds_its_cache_twice():
    logical = on("logical", gpu_memory_utilization=1.0, concurrency=4)
    assert on("transformers", concurrency=4).capacity.concurrency < logical.capacity.concurrency / 2


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("apple-m1-16gb", 10922.67),  # abetlen/llama-cpp-python, issue 687
        ("apple-m1-pro-32gb", 21845.34),  # ollama/ollama, issue 434
        ("apple-m1-max-64gb", 49152.00),  # ggml-org/llama.cpp, issue 1870
        ("apple-m2-max-96gb", 73728.00),  # ggml-org/llama.cpp, issue 3213
    ],
)
def test_an_apple_machine_may_fill_the_working_set_that_metal_prints(name, mib):
    limit = serve(load("llama-2-7b"), ServingPlan(gpu_memory_utilization=1.0), gpu(name)).capacity.limit
    assert limit / MiB == pytest.approx(mib, abs=0.01)


@pytest.mark.parametrize("engine", ENGINES)
def test_formulas_hold(engine):
    answer = on(engine, "deepseek-v2-lite", "h200-141gb", concurrency=3)
    assert_formulas_hold(answer.breakdown)
    assert_formulas_hold(Breakdown(Component("reserved", children=answer.reserved), "bytes"))


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_a_cache_format_that_an_engine_lacks_is_refused(engine):
    with pytest.raises(InputError, match="keeps its cache in"):
        on(engine, kv_dtype="q8_0")


def test_fields_of_another_engine_are_named():
    plan = ServingPlan(engine="vllm", gpu_layers=3, mem_fraction_static=0.9)
    assert set(plan.idle) == {"gpu_layers", "mem_fraction_static"}
    assert plan.idle["gpu_layers"] == "it is for llama.cpp; the engine is vllm"


@pytest.mark.parametrize("field", ["max_seqs", "max_batched_tokens", "kv_memory_gib"])
def test_a_zero_of_an_old_link_means_auto(field):
    assert getattr(ServingPlan(**{field: 0}), field) is None
    assert getattr(ServingPlan(**{field: "0"}), field) is None


def test_data_parallel_ranks_share_the_experts():
    """Qwen3-30B-A3B: 48 layers of 128 experts of 3 x 2048 x 768 weights; two ranks hold half of them each."""
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    alone, two = on("vllm", "qwen3-30b-a3b"), on("vllm", "qwen3-30b-a3b", dp=2, ep=2)
    assert alone.weights_bytes - two.weights_bytes == experts // 2
    assert two.kv_bytes_per_token == alone.kv_bytes_per_token
    with pytest.raises(ValueError, match=r"ep \(3\) must divide tp x dp"):
        ServingPlan(ep=3)


def test_sglang_gives_states_their_share_and_five_slots_a_request():
    """srt/mem_cache/kv_cache_configurator.py, _handle_max_mamba_cache: 0.9 / 1.9 of the budget in slots, one of them padding; a request
    takes 3 + 2 with the prefix cache and overlap, 1 without the cache. The rest is for tokens."""
    fields = {"kv_memory_gib": 20, "block_size": 1, "kv_dtype": "bf16"}
    answer = on("sglang", "qwen3-next-80b-a3b-thinking", **fields, context=1)
    token, state = answer.kv_bytes_per_token, answer.kv_fixed_bytes
    slots = int(20 * GiB * 0.9 / 1.9) // state - 1
    assert answer.capacity.tokens == (20 * GiB - (slots + 1) * state) // token
    assert answer.capacity.concurrency == slots // 5
    alone = on("sglang", "qwen3-next-80b-a3b-thinking", **fields, context=1, prefix_caching=False)
    assert alone.capacity.concurrency == slots
    assert alone.capacity.tokens == answer.capacity.tokens


def test_sglangs_pool_of_windows_alone_has_no_share_of_a_full_one():
    """srt/model_executor/pool_configurator.py, _recompute_cell_size: without full layers the ratio is not applied."""
    config = load_config("gpt-oss-20b")
    config["layer_types"] = ["sliding_attention"] * len(config["layer_types"])
    spec = from_config(config)
    plan = ServingPlan(engine="sglang", kv_memory_gib=10, block_size=1, kv_dtype="bf16", context=128)
    answer = serve(spec, plan)
    assert answer.capacity.tokens == 10 * GiB // (answer.kv_fixed_bytes // 128)


def test_sglangs_adapters_take_the_cache_pairs_for_every_linear_layer():
    """Llama-3.1-8B, eight slots of rank 16: A over the inputs and B over the outputs of seven projections in 32 layers."""
    h, kv, f = 4096, 1024, 14_336
    width = 32 * (2 * (h + h) + 2 * (h + kv) + 3 * (h + f))
    alone, adapted = on("sglang"), on("sglang", lora_slots=8)
    slots = next(part.total for part in adapted.reserved if part.name == "lora_slots")
    assert slots == 2 * 8 * 16 * width
    assert alone.capacity.budget - adapted.capacity.budget == slots
    assert "lora_slots" not in adapted.plan.idle
    assert "lora_slots" in on("tensorrt-llm", lora_slots=8).plan.idle
