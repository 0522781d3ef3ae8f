"""Adding a family is a few lines; a mutated config is counted exactly or refused; published totals are explained."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calc.catalogue import catalogue, load, load_config
from calc.errors import InputError
from calc.model import families
from calc.model.config import from_config, parse_config
from calc.parameters import parameters


def test_a_made_up_family_takes_a_few_lines(monkeypatch):
    from calc.model.families.base import Family
    from calc.model.families.common import assemble, attention, mlp, norms, uniform
    from calc.model.spec import Layer

    def made_up(fields):
        layer = Layer("layer", attention(fields, "head"), mlp(fields, gated=False), norms(fields))
        return assemble(fields, uniform(fields, layer), tied=True)

    monkeypatch.setitem(families.FAMILIES, "MadeUpForCausalLM", Family(made_up, "https://example.org/made_up.py"))
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 50,
    }
    spec = from_config({"architectures": ["MadeUpForCausalLM"], **sizes})
    assert parameters(spec).total == 50 * 8 + 3 * (4 * 8 * 8 + 2 * 4 + 2 * 8 * 16 + 2 * 8) + 8


# FORMULAS: golden totals and active counts (embedding included), each also printed by its publisher or a public run log
GOLDEN = {
    "llama-2-7b": (6_738_415_616, None),
    "meta-llama-3-8b": (8_030_261_248, None),
    "meta-llama-3-70b": (70_553_706_496, None),
    "meta-llama-3.1-405b": (405_853_388_800, None),
    "mixtral-8x7b-v0.1": (46_702_792_704, 12_879_925_248),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "deepseek-v3": (671_026_404_352, 37_552_282_624),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "gpt2": (124_439_808, 124_439_808),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_totals_and_active_counts_are_the_golden_ones(name):
    answer, (total, active) = parameters(load(name)), GOLDEN[name]
    assert answer.total == total
    assert active is None or answer.active == active


def test_a_hub_total_that_needs_no_explanation_is_the_count():
    plain = {name: entry.hub_total for name, entry in catalogue().items() if entry.hub_total and not entry.note}
    assert len(plain) > 50
    assert {name: parameters(load(name)).total for name in plain} == plain


# The Hub's totals that hold more than the class builds, and how much against the prediction layer: the corrections that the routers
# keep as buffers, one an expert in every mixture. DeepSeek's also hold the scales of 128 x 128 blocks.
HELD_BESIDE = {
    "deepseek-r1": 256 * 59 + 41_540_496,
    "deepseek-v3": 256 * 59 + 41_540_496,
    "deepseek-v3.2": 256 * 59,
    "mimo-v2-flash": 256 * 47 + 18_717_312,
    "glm-4.5": 160 * 90,
    "glm-4.5-air": 128 * 46,
    "glm-5": 256 * 76,
    "qwen3.5-27b": 0,
    "qwen3.5-122b-a10b": 0,
    "qwen3.6-35b-a3b": 0,
}


@pytest.mark.parametrize("name", HELD_BESIDE)
def test_the_prediction_layer_is_the_rest_of_the_hub_total(name):
    answer = parameters(load(name))
    prediction = answer.as_json()["not_in_total"]["prediction"]
    assert answer.total + prediction + HELD_BESIDE[name] == catalogue()[name].hub_total


@pytest.mark.parametrize("name", ["chatglm3-6b", "glm-4-9b-chat"])
def test_the_rest_of_chatglms_hub_total_is_its_rotary_frequencies(name):
    (layer,) = load(name).layers.kinds
    # RotaryEmbedding(kv_channels // 2) keeps one frequency for each pair of turned features
    assert parameters(load(name)).total + layer.mixer.rotary_dim // 2 == catalogue()[name].hub_total


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("chatglm3-6b", {"pre_seq_len": 128}),
        ("qwen-7b", {"kv_channels": 64}),
    ],
)
def test_a_field_that_adds_weights_of_another_kind_is_refused(name, change):
    with pytest.raises(InputError, match=next(iter(change))):
        from_config(load_config(name) | change)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen-7b", "visual"),
        ("glm-4-9b-chat", "vision_config"),
    ],  # Qwen-VL, GLM-4V: the text model's name with a field more
)
def test_an_encoder_in_a_text_models_config_is_left_out_and_said(name, key):
    config = load_config(name)
    spec = from_config(config | {key: {"width": 1664}})
    assert parameters(spec).total == parameters(from_config(config)).total
    assert any(key in note for note in spec.notes)


def test_only_the_larger_baichuan_models_bias_their_scores_and_say_so():
    rotary = {name: load(name).layers.kinds[0].mixer.rotary for name in ("baichuan-7b", "baichuan2-13b-chat")}
    assert rotary == {"baichuan-7b": True, "baichuan2-13b-chat": False}
    assert any("ALiBi" in text for text in load("baichuan2-13b-chat").assumptions)


def test_the_scales_of_deepseek_are_one_for_each_block_of_128_by_128():
    spec = load("deepseek-v3")
    (layer,) = spec.towers[0].stack.kinds
    total = 0
    for parts, count in [*zip(spec.layers.kind_parts, spec.layers.counts, strict=True), (layer.parts, 1)]:
        for part in parts:
            if part.name in ("attention", "mlp", "experts", "shared_expert"):
                sizes = [[dim.size for dim in weight.shape] for weight in part.weights]
                total += count * part.copies * sum(-(-s[0] // 128) * -(-s[1] // 128) for s in sizes if len(s) == 2)
    assert total == 41_540_496


def test_the_scales_of_mimo_are_one_for_each_block_in_each_of_its_joined_projections_four_shards():
    spec = load("mimo-v2-flash")
    (predicting,) = spec.towers[0].stack.kinds
    rows = [*zip(spec.layers.kinds, spec.layers.counts, strict=True), (predicting, len(spec.towers[0].stack))]
    total = 0
    for layer, count in rows:
        mixer, h = layer.mixer, -(-spec.hidden_size // 128)
        wide = (mixer.num_attention_heads + mixer.num_key_value_heads) * mixer.head_dim
        shard = (wide + mixer.num_key_value_heads * mixer.v_head_dim) // 4
        total += count * 4 * -(-shard // 128) * h
        for part in layer.feed_forward.parts:
            sizes = [[-(-side.size // 128) for side in weight.shape] for weight in part.weights]
            total += count * part.copies * sum(a * b for a, b in sizes) if part.name in ("mlp", "experts") else 0
    assert total == 18_717_312


def test_the_checkpoint_of_minimax_m2_holds_none_of_the_prediction_modules_that_its_config_tells_of():
    spec = load("minimax-m2.5")
    scales = 0
    for parts, count in zip(spec.layers.kind_parts, spec.layers.counts, strict=True):
        for part in parts:
            sizes = [[-(-side.size // 128) for side in weight.shape] for weight in part.weights]
            found = sum(each[0] * each[1] for each in sizes if len(each) == 2)
            scales += count * part.copies * found if part.name in ("attention", "experts") else 0
    corrections = 256 * len(spec.layers)
    assert parameters(spec).total + scales + corrections == catalogue()[spec.name].hub_total
    assert parameters(spec).not_in_total == {}


# Prediction layers of checkpoints without a published total that could hold them: what loaders of their files name and size
def test_the_prediction_layer_of_deepseek_v4_is_a_window_layer_with_two_projections_and_its_own_streams_head():
    spec = load("deepseek-v4-flash-fp8")
    h, n = spec.hidden_size, 4
    (layer,) = spec.towers[0].stack.kinds
    own = sum(part.parameters for part in layer.parts if part.name in ("projection", "stream_head"))
    assert own == 2 * h * h + n * n * h + n + 1  # mtp.0.e_proj, h_proj; hc_head_fn, hc_head_base, hc_head_scale
    assert {weight.name for part in layer.parts for weight in part.weights} >= {
        "token_norm",
        "hidden_norm",
        "final_norm",
    }
    assert layer.mixer.compress == 0
    assert layer.mixer.indexer is None


def test_the_prediction_layers_of_nemotron_3_are_attention_and_experts():
    spec = load("nvidia-nemotron-3-ultra-550b-a55b-bf16")
    first, second = spec.towers[0].stack.kinds
    h = spec.hidden_size
    kinds = {kind.kind: kind for kind in spec.layers.kinds}
    parameters_of = lambda layer: sum(part.parameters for part in layer.parts)  # noqa: E731
    assert parameters_of(first) == parameters_of(kinds["attention"]) + 2 * h * h + 2 * h  # eh_proj, enorm, hnorm
    assert parameters_of(second) == parameters_of(kinds["moe"]) + h  # final_layernorm


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2, 3, 7, 64, 96, 4096]),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-2, 300), max_size=80),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    st.just(["full_attention"] * 48),
)


def _places(config: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in config.items():
        found.append((*before, key))
        if isinstance(value, dict):
            found += _places(value, (*before, key))
    return found


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_one_mutated_field_is_counted_or_refused_within_a_second(data):
    config = copy.deepcopy(load_config(data.draw(st.sampled_from(sorted(catalogue())))))
    place = data.draw(st.sampled_from(_places(config)))
    inner = config
    for key in place[:-1]:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[place[-1]] = data.draw(JUNK)
    else:
        del inner[place[-1]]
    start = time.process_time()  # the machine may be busy with other things
    answer = _answer(config)
    assert time.process_time() - start < 1
    assert isinstance(answer, int) or (answer and "\n" not in answer and len(answer) < 600)


def _answer(config: dict[str, Any]) -> int | str:
    """The count, or the words of the refusal."""
    try:
        return parameters(from_config(config)).total
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"a": NaN}', '{"a": Infinity}', "[" * 100_000, '{"a":' * 5000])
def test_what_is_not_a_config_is_refused_in_one_line(text):
    with pytest.raises(InputError):
        from_config(parse_config(text))


def test_infinity_is_read_where_published_configs_hold_it_and_is_no_size():
    text = json.dumps(load_config("nvidia-nemotron-nano-9b-v2") | {"time_step_limit": [0.0, float("inf")]})
    assert "Infinity" in text
    spec = from_config(parse_config(text))
    assert parameters(spec).total == parameters(load("nvidia-nemotron-nano-9b-v2")).total
    with pytest.raises(InputError, match="hidden_size"):
        from_config(parse_config(text) | {"hidden_size": float("inf")})


def test_two_names_of_one_size_that_disagree_are_refused():
    config = load_config("mixtral-8x7b-v0.1") | {"num_experts": 4}
    with pytest.raises(InputError, match="must agree"):
        from_config(config)


@pytest.mark.parametrize("name", ["pythia-1b", "gpt-j-6b", "gpt2"])
def test_a_field_that_the_class_does_not_know_changes_no_count(name):
    config = load_config(name)
    plain = parameters(from_config(config)).total
    assert parameters(from_config(config | {"num_key_value_heads": 1, "head_dim": 24})).total == plain


def test_sizes_that_make_a_model_are_never_assumed():
    for missing in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        config = load_config("llama-2-7b")
        del config[missing]
        with pytest.raises(InputError, match=f"{missing}: missing"):
            from_config(config)
