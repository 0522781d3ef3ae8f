"""torchtitan's plans: what they allow, whose leaves sum and hold, and what the levels of recomputation keep."""

from __future__ import annotations

import pytest

from calc.catalogue import catalogue
from calc.errors import InputError, validated
from calc.hardware import gpu
from calc.training import TrainingPlan, train
from calc.training.advice.suggestions import suggest
from tests.calc.training.models import model
from tests.latex import assert_formulas_hold

TITAN = {"implementation": "torchtitan", "recipe": "fsdp-bf16", "zero": 3, "dp": 8, "seq": 1024}


def answer(name="meta-llama-3.1-8b", **changes):
    return train(model(name), validated(TrainingPlan, {**TITAN, **changes}))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"recipe": "pure-bf16"}, "recipe"),
        ({"recipe": "amp"}, "recipe"),
        ({"zero": 2}, "zero"),
        ({"dp": 1}, "dp"),
        ({"dp": 8, "dp_replicate": 8}, "dp_replicate"),
        ({"pp": 2, "schedule": "pipedream"}, "schedule"),
        ({"pp": 2, "root_group": True}, "pp"),
        ({"name": "qwen3-30b-a3b", "tp": 2, "ep_over_tp": True, "ep": 128, "dp": 128}, "ep"),
        ({"tp": 2, "sequence_parallel": False}, "sequence_parallel"),
        ({"attention": "eager"}, "attention"),
        ({"loss": "fused"}, "loss"),
        ({"loss": "chunked", "root_group": True}, "root_group"),
        ({"compile": "model,head"}, "compile"),
        ({"recompute_every": 2, "recompute": "selective"}, "recompute_every"),
        ({"float8": "tensorwise"}, "float8"),
        ({"simple_fsdp": True}, "simple_fsdp"),
        ({"simple_fsdp": True, "compile": "model", "root_group": True}, "simple_fsdp"),
        ({"float8": "rowwise", "compile": "model", "float8_all_gather": True}, "float8_all_gather"),
        ({"name": "qwen3-30b-a3b", "compile": "model"}, "compile"),
        ({"method": "lora"}, "method"),
    ],
)
def test_what_torchtitan_does_not_do_is_refused_with_the_field_named(changes, field):
    with pytest.raises(InputError, match=field):
        answer(**changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compile", "model"),
        ("recompute_every", 2),
        ("float8", "rowwise"),
        ("loss", "chunked-output"),
        ("experts_of", "2025-06"),
    ],
)
def test_its_options_are_refused_for_another_program(field, value):
    with pytest.raises(InputError, match=f"{field}.*'torchtitan'"):
        validated(TrainingPlan, {field: value, "recompute": "full"})


def test_a_loss_of_chunks_of_the_logits_reserves_what_was_measured():
    """Commit e23bb70: Llama-3-8B, 8 H100, 49.58 GiB before and 42.26 GiB after the loss is taken chunk by chunk."""
    shape = {"seq": 8192, "recompute": "selective", "optimizer_kernel": "fused", "root_group": True}
    for loss, measured in (("full", 49.58), ("chunked-output", 42.26)):
        plan = validated(TrainingPlan, {**TITAN, **shape, "loss": loss})
        found = train(model("meta-llama-3-8b"), plan, gpu("h100-sxm-80gb")).reserved_bytes
        assert found == pytest.approx(measured * 2**30, rel=0.004)


@pytest.mark.parametrize(("shape", "simple", "fsdp2"), [({}, 40.96, 47.82), ({"dp": 4, "tp": 2}, 28.28, 35.33)])
def test_simple_fsdp_reserves_what_was_measured(shape, simple, fsdp2):
    """Commit d9bdfbb: Llama-3-8B, 8 H100. One stream lends its freed blocks to gathers and reduce-scatters."""
    plan = {**TITAN, "seq": 8192, "recompute": "selective", "optimizer_kernel": "fused", **shape}
    for changes, measured in (({"compile": "model", "simple_fsdp": True}, simple), ({}, fsdp2)):
        found = train(model("meta-llama-3-8b"), validated(TrainingPlan, {**plan, **changes}), gpu("h100-sxm-80gb"))
        assert found.reserved_bytes == pytest.approx(measured * 2**30, rel=0.045)


def test_each_compiled_part_and_each_loss_needs_less():
    shape = {"recompute": "selective", "seq": 8192, "micro_batch": 2}
    for before, after in (
        ({}, {"compile": "model"}),
        ({"compile": "model"}, {"compile": "model,loss"}),
        ({}, {"loss": "chunked-output"}),
        ({"loss": "chunked-output"}, {"loss": "chunked"}),
    ):
        found = answer(**shape, **after)
        assert found.peak_bytes < answer(**shape, **before).peak_bytes, after
        assert found.breakdown.total == found.peak_bytes
        assert_formulas_hold(found.breakdown)


def test_a_pipeline_of_405b_gives_its_ends_a_layer_less():
    """torchtitan's own dealing of 126 layers to 8 stages; tests/published has the memory that these runs reserved."""
    plan = {**TITAN, "tp": 8, "pp": 8, "recompute": "full", "optimizer_kernel": "fused", "dp": 8, "global_batch": 64}
    found = train(model("meta-llama-3.1-405b"), validated(TrainingPlan, plan), gpu("h100-sxm-80gb"))
    assert [len(memory.stage.layers) for memory in found.stages] == [15, *[16] * 6, 15]


def test_experts_over_tensor_parallel_ranks_are_refused_for_a_program_that_has_no_such():
    with pytest.raises(InputError, match=r"ep_over_tp .*'hf'"):
        validated(TrainingPlan, {"tp": 2, "ep_over_tp": True})


def test_experts_over_tensor_parallel_ranks_are_whole_and_as_many():
    """DeepSeek-V2-Lite: the same bytes of experts a rank, in other shapes, and fewer tokens to each exchange."""
    divided, whole = (
        answer("deepseek-v2-lite", tp=2, dp=8, ep=4, ep_over_tp=over, recompute="selective") for over in (False, True)
    )
    assert divided.parameters_bytes == whole.parameters_bytes
    assert whole.activations_bytes < divided.activations_bytes
    for found in (divided, whole):
        assert found.breakdown.total == found.peak_bytes
        assert_formulas_hold(found.breakdown)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma-7b", "no program"), ("llama-3.2-1b", "untied"), ("phi-3-mini-4k-instruct", "no program")],
)
def test_a_model_that_torchtitan_has_no_program_for_is_refused(name, reason):
    with pytest.raises(InputError, match=reason):
        answer(name)


def test_every_model_is_answered_or_refused_and_leaves_sum_to_the_peak():
    answered = 0
    for name in catalogue():
        for changes in ({"recompute": "selective"}, {"recompute": "full", "micro_batch": 2}, {}):
            try:
                found = answer(name, **changes)
            except InputError:
                continue
            answered += 1
            assert found.breakdown.total == found.peak_bytes, (name, changes)
            assert_formulas_hold(found.breakdown)
    assert answered >= 30


@pytest.mark.parametrize("changes", [{"tp": 2}, {"tp": 8, "recompute": "selective"}, {"dp": 16, "dp_replicate": 2}])
def test_divided_layouts_have_formulas_that_hold(changes):
    for phase_heavy in ({}, {"seq": 8192}):
        found = answer(**changes, **phase_heavy)
        assert found.breakdown.total == found.peak_bytes
        assert_formulas_hold(found.breakdown)


def test_selective_recomputation_keeps_every_second_matmul_and_attention():
    """Of a Llama layer: its input, query, value, attention's output with its sums and seeds, gate, and the last matmul's output."""
    seq, h, kv, f, heads = 1024, 4096, 1024, 14336, 32
    layer = 2 * seq * (h + h + kv + h + f + h) + 4 * seq * heads + 2 * 512
    full = 2 * seq * h
    kept = answer(recompute="selective").activations_bytes - answer(recompute="full").activations_bytes
    assert kept == 32 * (layer - full)


def test_the_loss_outside_the_model_is_the_highest_point_of_a_large_vocabulary():
    found = answer(recompute="full", micro_batch=4)
    names = {row.path.partition("/")[2].partition("/")[0] for row in found.breakdown.rows() if "working" in row.path}
    assert found.peak_phase == "backward"
    assert names == {"loss"}


def test_what_helps_to_go_on_is_told_for_torchtitan_too():
    found = suggest(
        train(model("meta-llama-3.1-8b"), validated(TrainingPlan, {**TITAN, "seq": 8192}), gpu("a100-pcie-40gb"))
    )
    assert found.checkpoint.bytes == 8_030_261_248 * (4 + 8)
    assert found.largest_micro_batch == 0
    assert any(change.values.get("recompute") in ("selective", "full") for change in found.fixes)


def test_what_is_not_counted_is_said():
    notes = " ".join(answer("qwen3-30b-a3b").assumptions)
    assert "torch.compile" in notes
    assert "padding" in notes
    assert "ring attention" in " ".join(answer(cp=2).assumptions)
    assert "torchtitan" not in " ".join(train(model("llama-2-7b"), TrainingPlan(seq=512)).assumptions)


def test_gathered_in_float8_a_layer_takes_one_byte_a_weight_and_its_gradients_as_many_as_before():
    plain = {"seq": 8192, "recompute": "full", "compile": "model,loss"}
    narrow = {**plain, "float8": "tensorwise", "float8_all_gather": True}
    before, after = (answer(**each).worst.full_weights.layers[1] for each in (plain, narrow))
    matrices = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336
    assert before.whole.bytes - after.whole.bytes == matrices
    assert before.flat.bytes - after.flat.bytes == matrices
    assert (before.gradients, before.reduced) == (after.gradients, after.reduced)
