"""vLLM's block manager against what vLLM logged, to the token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calc.breakdown import Breakdown, Component
from calc.catalogue import load, load_config
from calc.errors import InputError
from calc.hardware import gpu
from calc.model.config import from_config
from calc.serving import ServingPlan, serve
from calc.serving.vllm.graphs import captured_sizes
from calc.serving.vllm.step import step_limits
from calc.units import GiB, KiB, MiB
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


def on(card: str, model: str = "meta-llama-3.1-8b", **plan):
    return serve(load(model), ServingPlan(engine="vllm", **plan), gpu(card))


def parts(answer) -> dict[str, int]:
    return {part.name: part.total for part in (*answer.breakdown.root.children[-1].children, *answer.reserved)}


def test_the_budget_is_what_weights_peak_and_reserve_leave_of_the_share():
    answer = on("h100-sxm-80gb", overhead_gib=0.5)
    left = answer.gpu.memory_bytes * 92 // 100 - answer.weights_bytes - answer.activation_bytes - GiB // 2
    assert abs(answer.capacity.budget - left) <= 1
    assert answer.capacity.fits


def test_the_formulas_of_the_profile_hold():
    for model, card, plan in (
        ("meta-llama-3.1-8b", "h100-sxm-80gb", {"engine_version": "0.19"}),
        ("deepseek-v2-lite", "a100-sxm-80gb", {"max_seqs": 16, "max_batched_tokens": 65_536}),
        ("qwen2.5-vl-7b-instruct", "h200-141gb", {"pp": 2}),
    ):
        answer = on(card, model, **plan)
        assert_formulas_hold(answer.breakdown)
        assert_formulas_hold(Breakdown(Component("reserved", children=answer.reserved), "bytes"))


def test_the_peak_grows_with_the_tokens_of_a_step():
    """vllm#10517 and #28228: as many tokens at once as the context leave no room for that context."""
    answer = on("rtx-3090-24gb", gpu_memory_utilization=0.9, context=29_000, max_batched_tokens=29_000)
    assert answer.activation_bytes == 29_000 * 2 * 3 * (4096 + 14_336) + 8 * MiB + 128 * KiB
    assert answer.capacity.fits is False
    small = on("rtx-3090-24gb", gpu_memory_utilization=0.9, context=29_000)
    assert small.activation_bytes < answer.activation_bytes / 3


@pytest.mark.parametrize(("version", "each"), [("0.6", 38), ("v0.16.0", 38), ("0.17", 14), (None, 14)])
def test_the_sampler_takes_what_its_version_holds_at_once(version, each):
    answer = on("h100-sxm-80gb", engine_version=version, max_seqs=1024, max_batched_tokens=2048)
    assert parts(answer)["sampler"] == each * 1024 * 128_256


def test_graphs_come_out_of_the_cache_from_0_21_on():
    assert "graph_bytes_full" not in parts(on("h100-sxm-80gb", engine_version="0.20"))
    assert parts(on("h100-sxm-80gb", engine_version="0.21"))["graph_bytes_piecewise"] > 0
    assert "graph_bytes_full" not in parts(on("h100-sxm-80gb", enforce_eager=True))


def test_captured_sizes_are_those_that_vllm_lists():
    """A start-up log of 0.23 with the defaults: PIECEWISE=51 (largest=512), FULL=35 (largest=256)."""
    assert len(captured_sizes(512)) == 51
    assert len(captured_sizes(256)) == 35
    assert captured_sizes(24) == (1, 2, 4, 8, 16, 24)


def test_an_experts_workspace_stays_from_0_17_on():
    """Qwen1.5-MoE on 8,192 tokens: 8,192 x 4 x (max(2 x 1408, 2048) + max(1408, 2048)) x 2 bytes besides the sampler."""
    assert parts(on("h100-sxm-80gb", "qwen1.5-moe-a2.7b", engine_version="0.19"))["expert_workspace"] == (
        8192 * 4 * (2816 + 2048) * 2
    )


def test_a_version_that_is_none_is_refused():
    for text in ("latest", "0.5", "1"):
        with pytest.raises(InputError, match=r"vLLM's versions from 0\.6"):
            on("h100-sxm-80gb", engine_version=text)


def test_a_budget_below_zero_says_what_is_missing():
    answer = on("rtx-3090-24gb", "qwen3-32b")
    assert answer.capacity.budget == 0
    assert any("No available memory for the cache blocks" in note and "GiB" in note for note in answer.notes)


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


def test_the_predicted_lines_are_those_of_the_log():
    """The start-up of Llama-3.1-8B on an H100 of 79.19 GiB with vLLM 0.19.0, to the last digit but two of the tokens."""
    card = replace(gpu("h100-sxm-80gb"), memory_bytes=int(79.19 * GiB))
    plan = ServingPlan(engine="vllm", engine_version="0.19", context=8192, gpu_memory_utilization=0.95)
    assert serve(load("meta-llama-3.1-8b"), plan, card).startup_lines == (
        "Model loading took 14.99 GiB memory",
        "Available KV cache memory: 58.11 GiB",
        "GPU KV cache size: 476,000 tokens",
        "Maximum concurrency for 8,192 tokens per request: 58.11x",
    )


def test_the_lines_refuse_as_vllm_does():
    lines = on(
        "rtx-3090-24gb", gpu_memory_utilization=0.9, context=29_000, max_batched_tokens=29_000, engine_version="0.6"
    ).startup_lines
    assert lines[-1].startswith("ValueError: To serve at least one request")
    assert "3.54 GiB KV cache is needed" in lines[-1]


def test_every_constant_names_its_version_and_source():
    constants = on("h100-sxm-80gb", engine_version="0.19").constants
    assert {row["name"] for row in constants} >= {"sampler_bytes", "non_torch_one_gpu", "graphs_counted"}
    assert all(row["since"] and row["source"] for row in constants)


def test_lora_slots_are_pairs_for_every_linear_layer():
    """Llama-3.1-8B, four slots of rank 16: A over the inputs and B over the outputs of seven projections in 32 layers."""
    h, kv, f = 4096, 1024, 14_336
    width = 32 * (2 * (h + h) + 2 * (h + kv) + 3 * (h + f))
    assert parts(on("h100-sxm-80gb", lora_slots=4))["lora_slots"] == 2 * 4 * 16 * width


def test_a_draft_brings_weights_and_a_layer_of_cache():
    alone, eagle = on("h100-sxm-80gb", kv_memory_gib=33), on("h100-sxm-80gb", kv_memory_gib=33, draft="eagle")
    assert parts(eagle)["draft_weights"] == 2 * (218_112_000 + 3 * 4096**2)
    assert eagle.capacity.blocks == 33 * GiB // (16 * 131_072 * 33 // 32)
    assert alone.capacity.blocks == 33 * GiB // (16 * 131_072)
    assert "draft_weights" not in parts(on("h100-sxm-80gb", draft="ngram"))
    assert parts(on("h200-141gb", "deepseek-v3", tp=8, draft="mtp"))["draft_weights"] > 2 * GiB
    with pytest.raises(InputError, match="no prediction layers"):
        on("h100-sxm-80gb", draft="mtp")


def test_the_first_engine_takes_a_whole_context_in_one_step():
    """Before 0.8, and before 0.11 on cards below compute capability 8.0."""
    assert step_limits(ServingPlan(engine_version="0.6", context=20_000), gpu("rtx-3090-24gb")) == (20_000, 256)
    assert step_limits(ServingPlan(engine_version="0.6", context=40_000), gpu("rtx-3090-24gb")) == (512, 256)
    assert step_limits(ServingPlan(engine_version="0.10", context=20_000), gpu("t4-16gb")) == (20_000, 256)
    assert step_limits(ServingPlan(engine_version="0.10", context=20_000), gpu("rtx-3090-24gb")) == (2048, 256)
    assert step_limits(ServingPlan(), gpu("b200-180gb")) == (16_384, 1024)
    assert step_limits(ServingPlan(engine_version="0.8"), gpu("a100-sxm-80gb")) == (8192, 1024)
    assert step_limits(ServingPlan(), gpu("a100-sxm-80gb")) == (2048, 256)


def llama_vision(size):
    config = load_config("llama-3.2-11b-vision-instruct")
    return from_config(config | {"vision_config": config["vision_config"] | {"image_size": size}})


def test_the_profile_of_llama_vision_is_that_of_the_log():
    """vllm#12126: `vllm serve meta-llama/Llama-3.2-11B-Vision --max-model-len 65536 --max-num-seqs 128 --enforce-eager` on an H100, the
    base model, whose vision_config has an image_size of 448: weights 19.86, activations 36.63, cache 14.65 GiB."""
    plan = ServingPlan(engine="vllm", engine_version="0.6", context=65536, max_seqs=128, enforce_eager=True)
    found = serve(llama_vision(448), plan, gpu("h100-sxm-80gb"))
    assert found.activation_bytes / GiB == pytest.approx(36.63, rel=1e-3)
    assert found.capacity.budget / GiB == pytest.approx(14.65, rel=0.02)
    assert_formulas_hold(found.breakdown)
    larger = serve(llama_vision(560), plan, gpu("h100-sxm-80gb"))
    assert larger.activation_bytes > 60 * GiB
    assert any("448 pixels" in note for note in larger.as_json()["notes"])
    assert (
        serve(llama_vision(560), plan.model_copy(update={"images": 0}), gpu("h100-sxm-80gb")).activation_bytes < 5 * GiB
    )


def test_the_encoder_is_the_highest_point_where_few_sequences_are_sampled():
    """Qwen2.5-VL: 16,384 tokens of 4 patches, each with three times 1,280 features and 3 x 3,420 of the feed-forward in 16 bits."""
    answer = serve(load("qwen2.5-vl-7b-instruct"), ServingPlan(engine="vllm", max_seqs=8), gpu("h100-sxm-80gb"))
    parts = {row.path.rsplit("/", 1)[-1]: row.value for row in answer.breakdown.rows() if "activations" in row.path}
    assert parts["encoder_block"] == 65536 * (3 * 1280 + 3 * 3420) * 2
    assert parts["encoder_outputs"] == 16384 * 3584 * 2
    assert "sampler" not in parts
    text = serve(load("qwen2.5-vl-7b-instruct"), ServingPlan(engine="vllm"), gpu("h100-sxm-80gb"))
    parts = {row.path.rsplit("/", 1)[-1]: row.value for row in text.breakdown.rows() if "activations" in row.path}
    assert "sampler" in parts
    assert parts["encoder_outputs"] == 16384 * 3584 * 2
    assert "encoder_block" not in parts
