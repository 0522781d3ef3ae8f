"""The trace against known right answers: bytes kept per layer for backward, from the real modules of transformers."""

from functools import cache

import pytest

from calc.catalogue import load_config
from measure.trace import TraceOptions, trace_step

pytestmark = pytest.mark.torch


@cache
def traced(name, seq=4096, **options):
    return trace_step(load_config(name), TraceOptions(seq=seq, **options))


def per_layer(result, name, seq=4096):
    """Bytes kept by a middle layer, in s·b·h."""
    return result.per_layer_bytes(1) / (seq * load_config(name)["hidden_size"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "multiple"),
    [("llama-2-7b", 45.5), ("meta-llama-3-8b", 49.0), ("meta-llama-3-70b", 48.5), ("qwen2-7b", 62.9)],
)
def test_a_dense_layer_keeps_exactly_its_ledger(name, multiple):
    config, seq = load_config(name), 4096
    h, f, a = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    k, d = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    root_mean_squares, log_sums, random_state = 2 * 4 * seq, 4 * a * seq, 2 * 512
    expected = seq * (16 * h + 4 * a * d + 4 * k * d + 8 * f) + root_mean_squares + log_sums + random_state
    assert traced(name).per_layer_bytes(1) == expected
    assert round(per_layer(traced(name), name), 1) == multiple


# catalogue name, options, s·b·h a layer as the literature's ledgers give it, digits
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("qwen3-8b", {}, 52.6),
        ("qwen3-0.6b", {}, 70.2),
        ("mixtral-8x7b-v0.1", {}, 85.1),
        ("qwen3-30b-a3b", {}, 95.0),
        ("olmo-2-1124-7b", {}, 65.5),
        ("llama-2-7b", {"recipe": "amp"}, 79.7),
        ("meta-llama-3-8b", {"recipe": "amp"}, 85.0),
        ("llama-2-7b", {"recipe": "fp32"}, 83.0),
        ("llama-2-7b", {"attention": "eager"}, 237.5),
        ("llama-2-7b", {"method": "lora", "lora_rank": 8}, 40.2),
        ("llama-2-7b", {"method": "lora", "lora_rank": 8, "lora_targets": ("all-linear",)}, 67.0),
        ("llama-2-7b", {"recompute": "full"}, 2.0),
    ],
)
def test_a_layer_keeps_the_published_multiple_of_s_b_h(name, options, expected):
    assert round(per_layer(traced(name, **options), name), 1) == expected


def test_head_and_loss_peak_at_two_and_a_half_and_three_times_the_fp32_logits():
    seq, name = 4096, "llama-2-7b"
    result, config = traced(name, seq), load_config("llama-2-7b")
    logits = 4 * seq * config["vocab_size"]
    outside = [row for row in result.saved if row.layer is None]
    head = {row.module: row for row in outside}
    assert head["lm_head"].nbytes == 2 * seq * config["hidden_size"]
    kept = [row.nbytes for row in outside if row.op == "_log_softmax"]
    assert kept == [logits]
    rest = result.parameters_bytes + result.optimizer_bytes + result.activations_bytes - logits
    scratch = 2**20  # labels, rotary tables' temporaries: far under one logit copy of 500 MiB
    assert abs(result.phases["forward"] - rest - 2.5 * logits) < scratch
    assert abs(result.phases["backward"] - rest - 3.0 * logits) < scratch
    assert abs(result.activations_bytes - sum(r.nbytes * r.count for r in result.saved if r.layer is not None)
               - logits - 8 * seq * config["hidden_size"]) < 4 * 2**20  # fmt: skip


def test_fused_projections_keep_the_whole_of_what_they_are_cut_from():
    """Phi-3: queries, keys and values are views of one tensor, and so are gate and up; flash's output is copied once."""
    name, seq = "phi-3.5-mini", 4096
    config = load_config(name)
    h, f, a, d = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"], 96
    attention = 2 * 3 * a * d + 2 * 2 * a * d + 2 * a * d + 2 * a * d  # qkv; rotated q, k; output; its copy for o_proj
    expected = seq * (16 * h + attention + 8 * f + 2 * 4 + 4 * a) + 2 * 512
    assert traced(name, seq).per_layer_bytes(1) == expected


def test_latent_attention_takes_the_efficient_kernel_and_keeps_values_as_a_view():
    result = traced("deepseek-v3")
    kept = {(row.op, row.shape) for row in result.saved if row.layer == 60 and row.module == "self_attn"}
    assert ("_scaled_dot_product_efficient_attention", (1, 128, 4096, 192)) in kept
    routers = 58 * 256 * 7168  # kept in fp32 (_keep_in_fp32_modules_strict)
    assert result.parameters_bytes == 2 * (671_026_404_352 + routers)
    assert (result.layers, result.layers_run) == (61, 4)


def test_grouped_heads_in_fp32_fall_to_plain_attention_and_keep_the_square():
    """CUDA's flash takes no fp32, and its efficient kernel no grouped heads (PyTorch 2.13): what is left keeps s² scores."""
    result = traced("meta-llama-3-8b", 2048, recipe="fp32")
    squares = [row for row in result.saved if row.layer == 1 and row.shape[-2:] == (2048, 2048)]
    assert [row.nbytes for row in squares] == [4 * 32 * 2048 * 2048]
