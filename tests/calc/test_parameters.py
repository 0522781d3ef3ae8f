"""Parameters against published figures, the textbook form, and LoRA's own example."""

from __future__ import annotations

import pytest

from calc.catalogue import catalogue, load
from calc.errors import InputError
from calc.parameters import ParametersPlan, parameters
from calc.stored import hub_total
from tests.latex import assert_formulas_hold
from tests.offenders import each

# model, total, active for a token with the embedding (None: dense, all of it): the models' own cards and papers
GOLDEN = [
    ("llama-2-7b", 6_738_415_616, None),
    ("meta-llama-3-8b", 8_030_261_248, None),
    ("meta-llama-3-70b", 70_553_706_496, None),
    ("meta-llama-3.1-405b", 405_853_388_800, None),
    ("mixtral-8x7b-v0.1", 46_702_792_704, 12_879_925_248),
    ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
    ("qwen3-235b-a22b", 235_093_634_560, 22_190_763_520),
    ("deepseek-v3", 671_026_404_352, 37_552_282_624),
    ("gpt-oss-20b", 20_914_757_184, 4_187_440_704),
    ("gpt2", 124_439_808, None),
]


@pytest.mark.parametrize(("model", "total", "active"), GOLDEN)
def test_totals_and_active_parameters_are_the_published_ones(model, total, active):
    answer = parameters(load(model))
    assert answer.total == total
    assert answer.active == (active or total)


@each(catalogue())
def test_leaves_sum_to_the_total_and_their_formulas_hold(model):
    answer = parameters(load(model))
    assert sum(part["value"] for part in answer.as_json()["components"]) == answer.total
    assert len({row.path for row in answer.breakdown.rows()}) == len(answer.breakdown.rows())
    assert_formulas_hold(answer.breakdown)
    assert 0 < answer.active <= answer.total
    assert answer.embedding <= answer.total


def test_a_path_is_stable():
    paths = [row.path for row in parameters(load("llama-2-7b")).breakdown.rows()]
    assert "parameters/layers/attention/query" in paths


def test_the_textbook_form_and_why_it_differs():
    answer = parameters(load("llama-2-7b")).textbook
    assert round(answer.total / 1e9, 2) == 6.60
    assert "131,072,000" in answer.reasons[0]


def test_lora_adds_r_times_the_sum_of_the_sides():
    spec = load("llama-2-7b")
    one = parameters(spec, ParametersPlan(lora_rank=8, lora_targets="q_proj"))
    assert one.trainable == 32 * 65_536  # LoRA on a 4096 x 4096 matrix at r = 8
    both = parameters(spec, ParametersPlan(lora_rank=8, lora_targets="q_proj, v_proj"))
    assert both.trainable == 2 * one.trainable == 4_194_304
    assert both.total == 6_738_415_616


def test_lora_on_a_fused_projection_is_one_adapter():
    spec = load("phi-3.5-mini")
    h, wide = 3072, 3 * 3072
    assert parameters(spec, ParametersPlan(lora_rank=4, lora_targets="qkv_proj")).trainable == 32 * 4 * (h + wide)


def test_lora_on_two_layers_of_one_name_is_two_adapters():
    # peft 0.21's own count for GPT-2, whose attention and MLP both end in a c_proj
    assert parameters(load("gpt2"), ParametersPlan(lora_rank=8)).trainable == 1_179_648


@pytest.mark.parametrize(("targets", "message"), [("q_prj", "lora_targets: 'q_prj' .* q_proj"), (",", "module names")])
def test_an_unknown_target_names_the_real_ones(targets, message):
    with pytest.raises(InputError, match=message):
        parameters(load("llama-2-7b"), ParametersPlan(lora_rank=8, lora_targets=targets))


@each(catalogue())
def test_what_a_token_uses_has_the_same_paths_and_no_more_in_any(model):
    answer = parameters(load(model))
    pairs = list(zip(answer.breakdown.rows(), answer.active_breakdown.rows(), strict=True))
    assert all(whole.path == active.path and active.value <= whole.value for whole, active in pairs)
    assert sum(active.value for _, active in pairs) == answer.active


def test_a_token_uses_8_of_the_128_experts_of_qwen3():
    answer = parameters(load("qwen3-30b-a3b"))
    whole, active = (
        {row.path: row.value for row in found.rows()} for found in (answer.breakdown, answer.active_breakdown)
    )
    changed = {path: value for path, value in whole.items() if active[path] != value}
    assert set(changed) == {f"parameters/layers/experts/{name}" for name in ("gate", "up", "down")}
    assert all(active[path] * 16 == value for path, value in changed.items())


def test_the_hubs_total_differs_by_the_layers_that_the_class_does_not_build_and_by_what_the_note_says():
    found = hub_total(parameters(load("deepseek-v3")))
    assert found.stated == 684_531_386_000  # as its page says
    assert found.difference == 684_531_386_000 - 671_026_404_352
    assert [reason.partition(":")[0] for reason in found.reasons] == ["+13,463,426,048", "+41,555,600"]
    assert hub_total(parameters(load("llama-2-7b"))) is None


@each(catalogue())
def test_the_reasons_why_the_hub_states_another_total_add_up(model):
    found = hub_total(parameters(load(model)))
    if found:
        shares = [int(reason.partition(":")[0].replace(",", "")) for reason in found.reasons]
        assert sum(shares) == found.difference
        assert "not explained" not in " ".join(found.reasons)
