"""The KV cache and what fits, against worked examples; and the laws that any answer keeps."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calc.catalogue import catalogue, load
from calc.errors import InputError, validated
from calc.hardware import custom_gpu, gpu
from calc.model.config import from_config
from calc.serving import ServingPlan, serve
from calc.units import GB, GiB
from tests.latex import assert_formulas_hold
from tests.offenders import each

H100 = gpu("h100-sxm-80gb")


def llama(**fields):
    """A Llama of 32 layers, hidden 4096 and 32 heads of 128."""
    base = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008}
    return from_config(base | {"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000} | fields)


# model, plan, bytes of one more token
PER_TOKEN = [
    ("llama-2-7b", {}, 524_288),
    ("meta-llama-3.1-8b", {}, 131_072),
    ("meta-llama-3.1-8b", {"kv_dtype": "fp8"}, 65_536),
    ("meta-llama-3.1-8b", {"kv_dtype": "int4"}, 32_768),
    ("meta-llama-3.1-8b", {"kv_dtype": "q8_0"}, 65_536 * 34 // 32),
    ("meta-llama-3.1-8b", {"kv_dtype": "q4_0"}, 65_536 * 18 // 32),
    ("meta-llama-3.1-70b", {}, 327_680),
    ("meta-llama-3.1-70b", {"tp": 8}, 40_960),
    ("meta-llama-3.1-70b", {"tp": 16}, 40_960),  # a rank holds at least one head
    ("meta-llama-3.1-70b", {"pp": 4}, 81_920),
    ("deepseek-v3", {}, 70_272),
    ("deepseek-v3", {"kv_dtype": "fp8"}, 35_136),
    ("deepseek-v3", {"tp": 8}, 70_272),  # a full copy on every rank
    ("qwen3-235b-a22b", {"tp": 4}, 48_128),
]


@pytest.mark.parametrize(("name", "plan", "token"), PER_TOKEN)
def test_bytes_of_one_more_token(name, plan, token):
    answer = serve(load(name), ServingPlan(**plan))
    assert answer.kv_bytes_per_token == token
    assert answer.kv_fixed_bytes == 0
    assert answer.kv_bytes_per_sequence == 4096 * token


@pytest.mark.parametrize(("size", "tokens"), [(10 * GiB, 20_480), (10 * GB, 19_073)])
def test_how_many_tokens_of_llama_2_7b_ten_gigabytes_hold(size, tokens):
    answer = serve(load("llama-2-7b"), ServingPlan(kv_memory_gib=size / GiB))
    assert answer.capacity.tokens == tokens
    assert answer.capacity.blocks == tokens // 16


WHOLE = [
    ("gemma-3-27b-it", 10.406),
    ("gpt-oss-20b", 3.003),
    ("deepseek-v3", 8.578),
    ("meta-llama-3.1-70b", 40.0),
]


@pytest.mark.parametrize(("name", "gib"), WHOLE)
def test_the_whole_cache_at_131072_tokens(name, gib):
    assert round(serve(load(name), ServingPlan(context=131_072)).kv_bytes_per_sequence / GiB, 3) == gib


def test_a_window_is_a_constant_once_full_and_grows_before():
    spec, token, window = load("gpt-oss-20b"), 2 * 8 * 64 * 2, 128
    for context in (1, 100, 127, 128, 129, 5000):
        answer = serve(spec, ServingPlan(context=context))
        assert answer.kv_bytes_per_sequence == 12 * token * context + 12 * token * min(context, window)
        assert (answer.kv_bytes_per_token, answer.kv_fixed_bytes) == (12 * token, 12 * token * window)


def test_ratios_to_mha():
    """Ratios of the GQA paper: MQA saves all a heads' share, GQA a/k, MHA nothing."""
    ratios = {kv: serve(llama(num_key_value_heads=kv), ServingPlan()).mha_ratio for kv in (32, 8, 1)}
    assert ratios == {32: 1.0, 8: 4.0, 1: 32.0}


def test_paged_attention_wastes_the_last_block_alone():
    answer = serve(load("llama-2-7b"), ServingPlan(context=9, block_size=4))
    assert (answer.blocks_per_sequence, answer.wasted_slots) == (3, 3)


def test_a_sink_and_window_cache_is_constant():
    spec = load("llama-2-7b")
    for context in (4096, 10**6):
        answer = serve(spec, ServingPlan(context=context, keep_sinks=4, keep_window=2044))
        assert answer.kv_bytes_per_sequence == answer.kv_fixed_bytes == 2048 * 524_288
        assert answer.kv_bytes_per_token == 0
        assert answer.capacity.tokens is None


def test_the_cache_saves_projecting_every_key_and_value_anew():
    answer = serve(load("llama-2-7b"), ServingPlan())
    assert answer.saved_flops_per_step == 4 * 1 * 4096 * 4096**2 * 32
    assert round(answer.saved_flops_per_step / 1e12, 2) == 8.80


def test_a_recurrence_keeps_the_same_whatever_the_length():
    spec = load("qwen3.5-122b-a10b")
    short, long = (serve(spec, ServingPlan(context=each)) for each in (1000, 100_000))
    assert short.kv_fixed_bytes == long.kv_fixed_bytes > 0
    assert long.kv_bytes_per_sequence - short.kv_bytes_per_sequence == 99_000 * short.kv_bytes_per_token
    assert short.kv_bytes_per_sequence == short.kv_fixed_bytes + 1000 * short.kv_bytes_per_token


def test_the_budget_is_what_weights_and_activations_leave():
    plan = ServingPlan(context=2048, concurrency=4, gpu_memory_utilization=0.9)
    answer = serve(load("llama-2-7b"), plan, custom_gpu(memory_gib=40.0))
    left = 40 * GiB * 9 // 10 - answer.weights_bytes - answer.activation_bytes
    assert answer.capacity.budget == left
    assert answer.capacity.tokens == left // 524_288
    assert answer.capacity.concurrency == left / (2048 * 524_288)
    assert answer.capacity.fits is True
    assert serve(load("llama-2-7b"), plan, custom_gpu(memory_gib=12.0)).capacity.fits is False


def test_the_stage_with_the_least_room_decides():
    spec, plan = load("meta-llama-3.1-8b"), ServingPlan(pp=3, context=8192)
    card = custom_gpu(memory_gib=24.0)
    answer = serve(spec, plan, card)
    assert answer.stage == 0  # the embedding and 11 of 32 layers; the last has the head and 10
    assert answer.kv_bytes_per_token == 11 * 4096
    alone = serve(spec, ServingPlan(context=8192), card)
    assert answer.capacity.tokens > alone.capacity.tokens


def test_decode_is_bound_by_memory_and_by_compute_at_a_large_batch():
    spec = load("meta-llama-3.1-8b")
    one = serve(spec, ServingPlan(context=2048, times="roofline"), H100)
    weights = one.weights_bytes - 2 * 128_256 * 4096  # the input embedding is looked up, not read
    assert one.speed.weights_read_bytes == weights
    assert one.speed.tpot_s == pytest.approx((weights + 2048 * 131_072) / H100.memory_bandwidth, rel=1e-12)
    assert one.speed.bound == "memory"
    many = serve(spec, ServingPlan(context=64, concurrency=2000, times="roofline"), H100)
    assert many.speed.bound == "compute"
    assert many.speed.tokens_per_s > one.speed.tokens_per_s


def test_a_batch_reads_the_experts_that_it_covers():
    spec = load("mixtral-8x7b-v0.1")
    one, many = (serve(spec, ServingPlan(concurrency=batch)).speed.weights_read_bytes for batch in (1, 64))
    expert = 3 * 4096 * 14336 * 2 * 32
    assert many - one == pytest.approx(6 * expert, rel=1e-6)  # all eight instead of two


@each(catalogue())
def test_leaves_sum_and_formulas_hold_for_every_load(name):
    spec = load(name)
    heads = [kind.mixer.num_attention_heads for kind in spec.layers.kinds if hasattr(kind.mixer, "num_attention_heads")]
    tp = 2 if all(count % 2 == 0 for count in heads) else 1
    for plan in (ServingPlan(concurrency=3), ServingPlan(tp=tp, pp=2, weights="gguf-Q4_K_M", kv_dtype="q8_0")):
        answer = serve(spec, plan, H100)
        rows = answer.breakdown.rows()
        assert sum(row.value for row in rows) == answer.weights_bytes + answer.kv_bytes + answer.activation_bytes
        assert answer.kv_bytes == plan.concurrency * answer.kv_bytes_per_sequence
        assert len({row.path for row in rows}) == len(rows)
        assert_formulas_hold(answer.breakdown)
        shown = json.loads(json.dumps(answer.as_json()))
        assert shown["components"] == answer.breakdown.components()
        assert shown["kv_bytes_per_token"] == answer.kv_bytes_per_token


NAMES = st.sampled_from(["llama-2-7b", "meta-llama-3.1-70b", "deepseek-v3", "gemma-2-27b", "gpt-oss-120b", "gpt2"])
KV = st.sampled_from(["bf16", "fp8", "int4", "q8_0", "q4_0"])


@settings(max_examples=60, deadline=None)
@given(NAMES, KV, st.integers(1, 200_000), st.integers(1, 500))
def test_the_cache_doubles_with_the_batch_and_is_affine_in_the_context(name, kv, context, batch):
    spec = load(name)
    one, two = (serve(spec, ServingPlan(kv_dtype=kv, context=context, concurrency=each)) for each in (batch, 2 * batch))
    assert two.kv_bytes == 2 * one.kv_bytes
    more = serve(spec, ServingPlan(kv_dtype=kv, context=context + 1, concurrency=batch))
    assert (
        more.kv_bytes_per_sequence - one.kv_bytes_per_sequence >= one.kv_bytes_per_token - 64
    )  # rounded up at most once a tensor
    assert one.kv_bytes_per_sequence <= one.kv_fixed_bytes + context * one.kv_bytes_per_token


@settings(max_examples=60, deadline=None)
@given(NAMES, KV, st.integers(0, 4), st.integers(1, 50_000))
def test_more_tensor_parallelism_never_raises_the_cache_or_the_weights(name, kv, power, context):
    spec = load(name)
    answers = []
    for tp in (2**power, 2 ** (power + 1)):
        try:
            answers.append(serve(spec, ServingPlan(tp=tp, kv_dtype=kv, context=context)))
        except InputError:
            return
    assert answers[1].kv_bytes <= answers[0].kv_bytes
    assert answers[1].weights_bytes <= answers[0].weights_bytes


@settings(max_examples=60, deadline=None)
@given(NAMES, st.integers(1, 64), st.integers(1, 60_000))
def test_tokens_held_is_the_largest_number_that_fits(name, batch, mib):
    from calc.serving.cache import cache_of

    spec = load(name)
    plan = ServingPlan(concurrency=batch)
    cache, counts, budget = cache_of(spec, plan), spec.layers.counts, mib * 2**20
    tokens = cache.tokens_held(counts, budget, batch)
    assert tokens == 0 or cache.pool_bytes(counts, tokens, batch) <= budget
    assert cache.pool_bytes(counts, tokens + 1, batch) > budget


@pytest.mark.parametrize("name", ["clip-vit-large-patch14", "snowflake-arctic-embed-m"])
def test_an_encoder_has_neither_a_cache_nor_a_speed_of_generation_and_says_why(name):
    answer = serve(load(name), ServingPlan(), H100)
    given = answer.as_json()
    nothing = (
        "kv_bytes_per_token",
        "kv_fixed_bytes",
        "kv_bytes",
        "kv_read_bytes",
        "blocks_per_sequence",
        "wasted_slots",
    )
    assert [given[key] for key in (*nothing, "saved_flops_per_step")] == [0] * 7
    unknown = ("kv_blocks", "kv_tokens", "max_concurrency", "mha_ratio", "tpot_s", "tokens_per_s", "bound")
    assert [given[key] for key in unknown] == [None] * 7
    assert given["fits"] is True
    assert given["ttft_s"] > 0
    assert any("generates nothing" in note for note in answer.notes)
    assert any("vision" in note for note in answer.notes) is ("clip" in name)


def test_only_encoders_generate_nothing():
    silent = [name for name in catalogue() if not load(name).generates]
    assert silent == ["clip-vit-large-patch14", "snowflake-arctic-embed-m"]


BAD = [
    ({"context": 0}, "context"),
    ({"kv_dtype": "int3"}, "kv_dtype"),
    ({"prompt": 4000, "output": 200}, r"prompt \(4000\) \+ output \(200\) must be at most context \(4096\)"),
    ({"keep_sinks": 4}, "keep_window"),
    ({"tp": 3}, r"tp \(3\) must divide num_attention_heads \(64\)"),
    ({"tp": 32, "pp": 81}, r"pp \(81\) must be at most num_hidden_layers \(80\)"),
    ({"engine": "tgi"}, "engine: 'tgi'"),
]


@pytest.mark.parametrize(("plan", "says"), BAD)
def test_bad_input_names_the_field(plan, says):
    with pytest.raises(InputError, match=says):
        serve(load("meta-llama-3.1-70b"), validated(ServingPlan, plan))
