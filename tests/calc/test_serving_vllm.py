"""vLLM's block manager against what vLLM logged, to the token."""

from __future__ import annotations

import pytest

from calc.catalogue import load, load_config
from calc.errors import InputError
from calc.hardware import gpu
from calc.model.config import from_config
from calc.serving import ServingPlan, serve
from calc.units import GiB
from tests.latex import assert_formulas_hold


def gemma_4_31b():
    """Its attention: 50 sliding layers of 16 KV heads of 256, 10 full ones of 4 heads of 512."""
    config = load_config("gemma-4-26b-a4b")
    config["text_config"] |= {
        "num_hidden_layers": 60,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "enable_moe_block": False,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    }
    return from_config(config)


def deepseek_v32():
    return from_config(
        load_config("deepseek-v3")
        | {"architectures": ["DeepseekV32ForCausalLM"], "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    )


LONG = {"context": 262_144, "max_batched_tokens": 8192}
# model, GiB for the cache, plan, tokens that vLLM prints
LOGGED = [
    ("meta-llama-3.1-8b", 58.11, {}, 476_032),
    ("gemma-4-31b", 64.68, LONG | {"async_scheduling": False}, 626_949),
    ("gemma-4-31b", 64.68, LONG, 509_255),
    ("qwen3.6-35b-a3b", 6.01, {"kv_dtype": "fp8", "context": 131_072}, 569_878),
    ("qwen3-235b-a22b", 8.11, {"tp": 4}, 180_928),
]


def vllm(name, **plan):
    spec = gemma_4_31b() if name == "gemma-4-31b" else load(name)
    return serve(spec, ServingPlan(engine="vllm", **plan))


@pytest.mark.parametrize(("name", "gib", "plan", "tokens"), LOGGED)
def test_the_tokens_that_vllm_prints(name, gib, plan, tokens):
    assert vllm(name, kv_memory_gib=gib, **plan).capacity.tokens == tokens


def test_blocks_of_llama():
    capacity = vllm("meta-llama-3.1-8b", kv_memory_gib=58.11).capacity
    assert (capacity.blocks, capacity.request_blocks, capacity.block_size) == (29_752, 256, 16)


@pytest.mark.parametrize(
    ("name", "kv", "block"),
    [("qwen3.5-27b", "bf16", 784), ("qwen3.5-27b", "fp8", 1568), ("qwen3.6-35b-a3b", "fp8", 2096)],
)
def test_a_hybrid_enlarges_its_attention_blocks_to_a_state(name, kv, block):
    assert vllm(name, kv_dtype=kv, kv_memory_gib=10).capacity.block_size == block


# blocks, length, requests at once: lines that vLLM logged, with blocks of 16
@pytest.mark.parametrize(
    ("blocks", "length", "requests"),
    [(1952, 20_000, 1.56), (1381, 2048, 10.79), (715, 2048, 5.59), (14_815, 512, 462.97), (32_056, 131_072, 3.91)],
)
def test_concurrency_is_blocks_over_the_blocks_of_a_request(blocks, length, requests):
    capacity = vllm("meta-llama-3.1-8b", kv_memory_gib=blocks * 16 * 131_072 / GiB, context=length).capacity
    assert capacity.blocks == blocks
    assert round(capacity.concurrency, 2) == requests


def test_deepseek_v32_has_a_layout_of_its_own_in_fp8():
    answer = serve(deepseek_v32(), ServingPlan(engine="vllm", kv_dtype="fp8"))
    assert answer.kv_bytes_per_token == 61 * (656 + 132) == 48_068
    assert_formulas_hold(answer.breakdown)


def test_the_budget_leaves_out_weights_the_sampler_and_what_is_not_torch():
    card = gpu("h100-sxm-80gb")
    answer = serve(load("meta-llama-3.1-8b"), ServingPlan(engine="vllm", overhead_gib=0.5), card)
    assert answer.activation_bytes == 15 * 1024 * 128_256
    left = int(card.memory_bytes * 92 // 100) - answer.weights_bytes - answer.activation_bytes - GiB // 2
    assert abs(answer.capacity.budget - left) <= 1
    assert answer.capacity.fits


@pytest.mark.parametrize("plan", [{"kv_dtype": "q8_0"}, {"kv_dtype": "int4"}])
def test_what_vllm_cannot_keep_is_refused(plan):
    with pytest.raises(InputError, match="vLLM keeps its cache in bf16"):
        serve(load("llama-2-7b"), ServingPlan(engine="vllm", **plan))


def test_compressed_attention_is_refused():
    with pytest.raises(InputError, match="use logical"):
        serve(load("deepseek-v4-pro"), ServingPlan(engine="vllm", kv_memory_gib=10))


@pytest.mark.parametrize(("model", "engine", "told"), [
    ("mamba-370m-hf", "vllm", True), ("mamba-370m-hf", "logical", False), ("llama-2-7b", "vllm", False),
])  # fmt: skip
def test_it_is_told_where_vllm_may_keep_a_recurrence_in_fewer_bits(model: str, engine: str, told: bool):
    notes = serve(load(model), ServingPlan(engine=engine)).notes
    assert any("mamba-ssm-cache-dtype" in note for note in notes) is told
