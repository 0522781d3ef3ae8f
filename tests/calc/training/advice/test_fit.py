"""What would make a step fit does, the largest values are exact, and a checkpoint holds what published ones do."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calc.cli import run
from calc.compute import ComputePlan, compute
from calc.errors import validated
from calc.hardware import gpu
from calc.training import TrainingPlan, suggest, train, train_and_suggest
from calc.training.advice.checkpoint import DISK, HOST, HOST_SHARDS, checkpoint
from calc.training.advice.fit import changes_that_fit, single_changes
from calc.training.advice.largest import LIMITS, divisors, largest, longest_sequence, sequence_unit, with_own_share
from calc.units import GiB
from tests.calc.training.models import model
from tests.latex import assert_formulas_hold, evaluate

H100, RTX_4090, T4 = gpu("h100-sxm-80gb"), gpu("rtx-4090-24gb"), gpu("t4-16gb")

# plans that do not fit: model, GPU, plan
TOO_LARGE = [
    ("llama-2-7b", RTX_4090, {}),
    ("llama-2-7b", H100, {"micro_batch": 8}),
    ("llama-2-7b", H100, {"micro_batch": 16, "seq": 8192}),
    ("llama-2-7b", H100, {"recipe": "amp", "dp": 8, "global_batch": 64, "micro_batch": 2}),
    ("llama-2-7b", H100, {"method": "lora", "micro_batch": 8, "seq": 8192}),
    ("llama-2-7b", H100, {"tp": 2, "micro_batch": 12, "optimizer": "lion"}),
    ("meta-llama-3.1-70b", H100, {"dp": 8}),
    ("meta-llama-3.1-70b", H100, {"dp": 16, "zero": 1, "micro_batch": 2}),
    ("qwen3-30b-a3b", H100, {"dp": 4, "micro_batch": 4, "implementation": "fused", "recipe": "megatron-bf16"}),
    ("mixtral-8x7b-v0.1", H100, {"dp": 8, "ep": 8, "zero": 2, "seq": 8192}),
    ("deepseek-v3", H100, {}),
    ("gpt2", T4, {"micro_batch": 16, "seq": 1024, "recipe": "amp"}),
    ("gpt2", T4, {"micro_batch": 24, "seq": 1024, "implementation": "paper", "recipe": "fp32"}),
    ("bloom", H100, {"recipe": "mixed-16", "dp": 8, "tp": 4, "pp": 12, "seq": 2048}),
]
FITS = [
    ("llama-2-7b", H100, {}),
    ("gpt2", T4, {"seq": 1024}),
    ("gpt2", T4, {"seq": 512, "micro_batch": 2, "recipe": "amp", "dp": 4, "zero": 3}),
]


def near(spec, plan, values, machine):
    """The answer of changed values, with the share of fragmentation that the search takes: the first plan's own."""
    return train(spec, plan_of(values | {"fragmentation_percent": _share(spec, plan, machine)}), machine)


@cache
def _share(spec, plan, machine):
    return with_own_share(spec, plan, machine).fragmentation_percent


changes_of = cache(changes_that_fit)  # several tests ask for the same plans' changes


def plan_of(values) -> TrainingPlan:
    return validated(TrainingPlan, values)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "machine", "values"), TOO_LARGE)
def test_every_change_once_applied_fits_and_says_what_it_needs(name, machine, values):
    spec, plan = model(name), plan_of(values)
    before = train(spec, plan, machine).driver_bytes
    assert before > machine.memory_bytes
    changes = changes_of(spec, plan, machine)
    assert changes
    for change in changes:
        answer = train(spec, plan_of(values | change.values), machine)
        assert answer.fits, change.name
        assert answer.plan == change.plan
        assert answer.driver_bytes == change.driver_bytes == before - change.saved_bytes
        assert change.saved_bytes > 0
        assert (answer.plan.gpus > plan.gpus) == change.adds_gpus


@pytest.mark.slow
@pytest.mark.parametrize(("name", "machine", "values"), TOO_LARGE)
def test_no_change_can_leave_out_one_of_its_parts(name, machine, values):
    """Pairs are shown only where no single change is enough, and none holds a part that it could do without."""
    spec, plan = model(name), plan_of(values)
    changes = changes_of(spec, plan, machine)
    assert len({change.flags for change in changes}) == len(changes)
    for change in changes:
        parts = [each for each in change.values if each != "global_batch"]
        traded = (
            "dp" in parts and change.values["dp"] < plan.dp
        )  # tensor parallelism instead of data parallelism is one change
        if "dp" in parts and len(change.costs) < len(parts):
            parts.remove("dp" if traded else "zero")  # and FSDP is one of both
        assert len(change.costs) == len(parts)
        for part in parts if len(parts) > 1 else ():
            dropped = {part} | (
                {"global_batch"} if part == "micro_batch" else {"dp"} if traded and part == "tp" else set()
            )
            rest = {key: value for key, value in change.values.items() if key not in dropped}
            assert not near(spec, plan, values | rest, machine).fits, (change.name, part)


def test_tensor_parallelism_over_the_same_gpus_is_offered_and_no_more_gpus_where_it_does():
    spec = model("meta-llama-3-8b")
    plan = TrainingPlan(dp=8, recipe="megatron-bf16", implementation="fused", global_batch=64)
    changes = changes_that_fit(spec, plan, H100)
    assert {change.plan.gpus for change in changes} == {8}
    (traded,) = [change for change in changes if "tp" in change.values]
    assert traded.values == {"tp": 4, "dp": 2, "global_batch": 64}


@pytest.mark.parametrize(("name", "machine", "values"), FITS)
def test_nothing_is_suggested_for_what_fits(name, machine, values):
    assert changes_that_fit(model(name), plan_of(values), machine) == ()


PLANS = st.fixed_dictionaries(
    {
        "seq": st.sampled_from([1024, 4096, 8192]),
        "micro_batch": st.sampled_from([1, 2, 6, 16]),
        "dp": st.sampled_from([1, 2, 8, 64]),
        "zero": st.integers(0, 3),
        "pp": st.sampled_from([1, 1, 4]),
        "recipe": st.sampled_from(["pure-bf16", "amp", "fp32", "megatron-bf16", "fsdp-bf16"]),
        "optimizer": st.sampled_from(["adamw", "sgd", "muon", "lion"]),
        "recompute": st.sampled_from(["none", "full"]),
        "implementation": st.sampled_from(["hf", "fused"]),
        "schedule": st.sampled_from(["1f1b", "gpipe"]),
    }
)
MODELS = st.sampled_from(["llama-2-7b", "meta-llama-3.1-70b", "qwen3-8b", "mixtral-8x7b-v0.1", "gemma-2-9b", "gpt2"])


@pytest.mark.slow
@settings(max_examples=10, deadline=None)  # others in each run
@given(MODELS, st.sampled_from([H100, RTX_4090, T4]), PLANS)
def test_any_plan_either_fits_or_is_told_what_would_make_it_fit(name, machine, values):
    spec, plan = model(name), plan_of(values)
    changes = changes_that_fit(spec, plan, machine)
    if train(spec, plan, machine).fits:
        assert not changes
    assert all(train(spec, plan_of(values | change.values), machine).fits for change in changes)
    for field in ("micro_batch", "seq"):
        found = largest(spec, plan, machine, field)
        assert not found or near(spec, plan, values | {field: found}, machine).fits
        for more in (1, 2, 3, 7, 50, 333) if field == "micro_batch" or found < longest_sequence(spec) else ():
            assert not near(spec, plan, values | {field: found + more}, machine).fits


def test_nothing_is_suggested_without_a_gpu():
    found = train_and_suggest(model("deepseek-v3"), TrainingPlan())
    assert found.fixes == ()
    assert found.largest_micro_batch is None
    assert found.largest_seq is None


@pytest.mark.parametrize(("name", "machine", "values"), TOO_LARGE + FITS)
@pytest.mark.parametrize("field", ["micro_batch", "seq"])
def test_the_largest_value_fits_and_the_next_does_not(name, machine, values, field):
    spec, plan = model(name), plan_of(values)
    found = largest(spec, plan, machine, field)
    if field == "micro_batch" and plan.global_batch is not None:
        allowed = divisors(plan.global_batch // plan.dp)
    else:
        unit = sequence_unit(plan) if field == "seq" else 1
        allowed = [found, found + unit] if found else [unit]
        assert found % unit == 0
        if field == "seq":
            allowed = [value for value in allowed if value <= longest_sequence(spec)]
    fits = [value for value in allowed if value and near(spec, plan, values | {field: value}, machine).fits]
    assert max(fits, default=0) == found


@pytest.mark.parametrize("field", ["micro_batch", "seq"])
def test_a_machine_without_end_takes_the_largest_value_that_the_plan_allows(field):
    endless = replace(H100, memory_bytes=2**80)
    assert largest(model("qwen3-8b"), TrainingPlan(seq=128), endless, field) == LIMITS[field]


@pytest.mark.parametrize("seq", [128, 1024, 4096])
def test_the_largest_sequence_ends_with_the_learned_positions(seq):
    assert largest(model("gpt2"), TrainingPlan(seq=seq), H100, "seq") == 1024


def as_large_as(spec, values):
    """A GPU whose memory the plan just fills."""
    return replace(H100, memory_bytes=train(spec, plan_of(values), H100).driver_bytes)


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen3-30b-a3b", "gpt2"])
@pytest.mark.parametrize(("implementation", "level"), [("hf", "full"), ("fused", "selective"), ("fused", "full")])
def test_recomputation_costs_the_flops_that_compute_counts(name, implementation, level):
    spec = model(name)
    values = {"micro_batch": 16, "seq": 1024, "dp": 64, "zero": 3, "implementation": implementation}
    machine = as_large_as(spec, values | {"recompute": level})
    found = [each.costs[0] for each in changes_that_fit(spec, plan_of(values), machine) if "recompute" in each.values]
    figures = {each: compute(spec, ComputePlan(seq=1024, recompute=each)).causal for each in ("selective", "full")}
    expected = {each: figure.hardware_flops / figure.training_flops for each, figure in figures.items()}
    assert [cost.ratio for cost in found] == [expected[level]] or level == "selective"
    assert all(cost.ratio in expected.values() for cost in found)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "machine", "values"), TOO_LARGE)
def test_each_costs_number_is_its_formula(name, machine, values):
    for change in changes_of(model(name), plan_of(values), machine):
        for cost in change.costs:
            assert cost.text
            assert (cost.ratio is None) == (cost.formula is None)
            if cost.formula:
                assert cost.ratio == float(evaluate(cost.formula, cost.numbers))
                assert cost.formula.source


def test_zero_3_moves_one_and_a_half_times_the_bytes_and_zero_1_none_more():
    """ZeRO, arXiv 1910.02054, section 7."""
    spec = model("llama-2-7b")
    found = changes_that_fit(spec, TrainingPlan(dp=64, recipe="amp"), H100)
    one = next(each for each in found if list(each.values) == ["zero"])
    assert one.costs[0].ratio == (1.5 if one.values["zero"] == 3 else 1)
    sharded = [
        each for each in changes_that_fit(spec, TrainingPlan(recipe="amp", dp=2), H100) if each.values.get("zero") == 3
    ]
    assert {cost.ratio for each in sharded for cost in each.costs if cost.quantity == "communication"} <= {1.5}


def test_the_least_painful_change_comes_first():
    """A step of BLOOM in its own layout, on GPUs that lack only what the step's temporaries take: a fused kernel spares them."""
    spec, values = model("bloom"), {"recipe": "mixed-16", "dp": 8, "tp": 4, "pp": 12, "seq": 2048}
    changes = changes_that_fit(spec, plan_of(values), as_large_as(spec, values | {"optimizer_kernel": "fused"}))
    assert [change.values for change in changes[:2]] == [{"optimizer_kernel": "fused"}, {"zero": 1}]


def test_a_checkpoint_of_bloom_has_the_published_sizes():
    """BigScience: "only the bf16 weights are 329GB, the full checkpoint with optimizer states is 2.3TB", as du -h rounds up.

    https://bigscience.notion.site/BigScience-176B-Model-ad073ca07cdf479398d5f95d88e218c4
    """
    found = checkpoint(model("bloom"), TrainingPlan(recipe="mixed-16", dp=8, tp=4, pp=12))
    assert ceil(found.weights_bytes / GiB) == 329
    assert ceil(found.bytes / (1024 * GiB) * 10) / 10 == 2.3
    assert found.bytes == 7 * found.weights_bytes  # 14 bytes a parameter over 2


@pytest.mark.parametrize("recipe", ["pure-bf16", "amp", "fp32", "mixed-16", "fsdp-bf16", "fp8"])
def test_a_checkpoint_is_the_same_for_every_layout_and_its_formulas_hold(recipe):
    spec = model("qwen3-30b-a3b")
    alone = checkpoint(spec, TrainingPlan(recipe=recipe))
    spread = checkpoint(spec, TrainingPlan(recipe=recipe, dp=16, tp=2, pp=4, ep=8, zero=3, cp=2))
    assert alone.bytes == spread.bytes
    assert alone.weights_bytes == spread.weights_bytes
    assert_formulas_hold(alone.breakdown)
    for found, processes in ((alone, 1), (spread, 8)):
        assert evaluate(DISK, found.numbers) == found.bytes
        assert found.processes == processes
        assert evaluate(found.host_formula, found.numbers) == found.host_bytes
    assert alone.host_formula is HOST
    assert alone.host_bytes == alone.bytes
    assert spread.host_formula is HOST_SHARDS
    # 32 nodes of 8 ranks; the stages with the embedding and the head have more than their part
    assert spread.bytes <= 32 * spread.host_bytes < 1.1 * spread.bytes


@pytest.mark.parametrize(("zero", "dp"), [(0, 8), (2, 8), (3, 1), (3, 8), (3, 16)])
def test_a_node_loads_the_whole_checkpoint_in_each_process_or_its_shards_once(zero, dp):
    """Llama-2-7B: all its tensors divide by 16."""
    plan = TrainingPlan(recipe="mixed-16", seq=1024, dp=dp, zero=zero)
    found = checkpoint(model("llama-2-7b"), plan)
    assert found.bytes == 14 * 6_738_415_616
    assert found.host_bytes == (found.bytes * min(8, dp) // dp if zero == 3 else 8 * found.bytes)


@pytest.mark.parametrize(
    "fields",
    [{"implementation": "fused", "tp": 8}, {"implementation": "torchtitan", "dp": 8, "zero": 3, "recipe": "fsdp-bf16"}],
)
def test_programs_that_save_in_shards_load_them_rank_by_rank(fields):
    found = checkpoint(model("meta-llama-3.1-8b"), TrainingPlan(**fields))
    assert found.host_formula is HOST_SHARDS
    assert (
        found.bytes <= found.host_bytes < 1.01 * found.bytes
    )  # norms lie whole on every rank of a tensor-parallel group


def test_a_checkpoint_of_adapters_holds_adapters_alone():
    """Llama-2-7B at rank 8 on q and v: 4,194,304 weights in fp32, with two moments of them."""
    found = checkpoint(model("llama-2-7b"), TrainingPlan(method="lora"))
    assert found.weights_bytes == 4 * 4_194_304
    assert found.bytes == 12 * 4_194_304
    assert found.frozen_bytes == 2 * 6_738_415_616
    assert found.host_bytes == found.bytes + found.frozen_bytes


def test_a_tied_head_is_saved_once():
    gpt2 = model("gpt2")
    assert gpt2.tied
    assert checkpoint(gpt2, TrainingPlan(seq=1024, recipe="fp32", pp=2)).weights_bytes == 4 * 124_439_808


def test_the_command_line_adds_the_suggestions_when_asked():
    words = ["train", "llama-2-7b", "--gpu", "h100-sxm-80gb", "--micro-batch", "8"]
    plain, more = (json.loads(run([*words, "--format", "json", *extra])) for extra in ([], ["--suggest"]))
    assert plain == {key: value for key, value in more.items() if key in plain}
    assert set(more) - set(plain) == {
        *("fixes", "largest_micro_batch", "largest_seq", "checkpoint", "checkpoint_bytes"),
        *("checkpoint_weights_bytes", "checkpoint_host_bytes"),
    }
    flags = [row["flags"] for row in more["fixes"]]
    assert "--recompute full" in flags
    for row in more["fixes"]:
        again = json.loads(run([*words[:4], *_overridden(words[4:], row["flags"].split()), "--format", "json"]))
        assert again["fits"]
        assert again["driver_bytes"] == row["driver_bytes"]
    table = run([*words, "--suggest"])
    assert "what would make it fit" in table
    assert all(each in table for each in flags)
    assert "what would make it fit" not in run(words)


def _overridden(words, flags):
    """The words of a command with later flags in place of equal ones."""
    pairs = dict(zip(words[::2], words[1::2], strict=True)) | dict(zip(flags[::2], flags[1::2], strict=True))
    return [word for pair in pairs.items() for word in pair]


def test_suggest_takes_an_answer_as_it_is():
    answer = train(model("llama-2-7b"), TrainingPlan(), H100)
    found = suggest(answer)
    assert found.breakdown is answer.breakdown
    assert found.largest_micro_batch >= 1
    assert found.largest_seq >= 4096


def test_single_changes_save_what_their_plans_save():
    plan = TrainingPlan(recipe="amp", micro_batch=4)
    answer = train(model("llama-2-7b"), plan, gpu("b200-180gb"))
    found = single_changes(answer)
    assert {"loss", "recompute", "optimizer", "recipe", "method"} <= {name for each in found for name in each.values}
    for change in found:
        assert change.driver_bytes == train(answer.spec, change.plan, answer.gpu).driver_bytes
        assert change.saved_bytes == answer.driver_bytes - change.driver_bytes > 0
