"""The topics about time and communication against counts made another way."""

import itertools

import numpy as np
import pytest

from calc.communication import CommunicationPlan, communication
from calc.errors import InputError
from calc.hardware import gpu
from calc.learn.all_reduce import AllReducePlan, ring, volumes
from calc.learn.batching import BatchingPlan, continuous, read_lengths, static
from calc.learn.compute_budget import ComputeBudgetPlan, above_best, compute_budget
from calc.learn.half_precision import HalfPrecisionPlan, scaled, summed
from calc.learn.layer_roofline import LayerRooflinePlan, layer_roofline
from calc.learn.parallel_layer import ParallelLayerPlan, parallel_layer
from calc.learn.parts_by_cost import PartsByCostPlan, parts_by_cost
from calc.learn.speculation import SpeculationPlan, gains
from calc.model.bare import BareModelPlan, bare_model
from calc.parameters import parameters


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16])
def test_a_ring_ends_with_every_sum_on_every_rank(ranks):
    plan = AllReducePlan(ring_ranks=ranks, ring_step=2 * (ranks - 1), message_bytes=ranks * 1000)
    found = ring(plan)
    assert found.summed == ((ranks,) * ranks,) * ranks
    assert found.sent == volumes(plan)[0].busiest == 2 * (ranks - 1) * 1000
    half = ring(plan.model_copy(update={"ring_step": ranks - 1}))
    assert sum(count == ranks for row in half.summed for count in row) == ranks  # each rank has the sum of one chunk
    assert all(max(row) == ranks for row in half.summed)
    with pytest.raises(InputError, match="ring_step"):
        ring(plan.model_copy(update={"ring_step": 2 * ranks - 1}))


@pytest.mark.parametrize(("ranks", "tree", "deep"), [(2, 1, 1), (3, 2, 1), (4, 2, 2), (7, 3, 2), (8, 3, 3), (16, 3, 4)])
def test_a_tree_s_busiest_rank(ranks, tree, deep):
    _, found, server = volumes(AllReducePlan(ring_ranks=ranks, message_bytes=10))
    assert (found.busiest, found.steps) == (10 * tree, 2 * deep)
    assert server.busiest == 10 * (ranks - 1)


def simulated(lengths, slots, waits_for_all):
    """Steps and tokens, one step after another."""
    waiting, running, steps = list(lengths), [], 0
    while waiting or running:
        if not (waits_for_all and running):
            while waiting and len(running) < slots:
                running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        steps += 1
    return steps


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("text", ["3, 7, 2, 9, 4, 6, 1, 8", "1", "5,5,5,5", "9,1,1,1,1,1,1,1,1,1"])
def test_batches_take_the_steps_of_a_run(text, slots):
    plan, lengths = BatchingPlan(request_tokens=text, slots=slots), read_lengths(text)
    assert static(plan).steps == simulated(lengths, slots, True)
    assert continuous(plan).steps == simulated(lengths, slots, False)
    for found in (static(plan), continuous(plan)):
        assert found.used == pytest.approx(sum(lengths) / (slots * found.steps), rel=1e-15)
        taken = [(turn.slot, step) for turn in found.turns for step in range(turn.start, turn.end)]
        assert len(taken) == len(set(taken)) == sum(lengths)


@pytest.mark.parametrize("text", ["", "0", "-1", "2.5", "a", "10000", "²", ",".join(["1"] * 65)])
def test_what_is_no_length_is_named(text):
    with pytest.raises(InputError, match="request_tokens"):
        read_lengths(text)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 0.99])
def test_a_draft_s_tokens_are_those_of_every_outcome(acceptance):
    for gain in gains(SpeculationPlan(acceptance=acceptance, draft_cost=0.1))[:6]:
        expected = 0.0
        for outcome in itertools.product((True, False), repeat=gain.drafted):
            chance = np.prod([acceptance if accepted else 1 - acceptance for accepted in outcome])
            kept = next((place for place, accepted in enumerate(outcome) if not accepted), gain.drafted)
            expected += chance * (kept + 1)
        assert gain.tokens == pytest.approx(expected, rel=1e-12)
        assert gain.speedup == pytest.approx(expected / (1 + 0.1 * gain.drafted), rel=1e-12)


def test_a_layer_split_over_ranks_is_the_model_s_layer_and_sends_what_the_step_sends():
    sizes = BareModelPlan(num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8)
    spec, plan = bare_model(sizes), ParallelLayerPlan(layer_tokens=4096, tensor_ranks=4, split_norms=False)
    alone = parallel_layer(plan.model_copy(update={"tensor_ranks": 1}))
    layer = next(part for part in parameters(spec).breakdown.root.children if part.name == "layers")
    assert alone.parameters == layer.total
    norms = 2 * 4096
    assert parallel_layer(plan).parameters == (layer.total - norms) // 4 + norms
    step = communication(spec, CommunicationPlan(tp=4, seq=4096, micro_batch=1), gpu("h100-sxm-80gb"))
    within = [each.collective for each in step.collectives if each.collective.name.startswith("layer")]
    assert within
    assert sum(each.bytes for each in parallel_layer(plan).sent) == sum(each.sent_bytes for each in within)


def test_experts_are_spread_whole_and_sent_tokens_twice_each_way():
    plan = ParallelLayerPlan(tensor_ranks=1, layer_experts=8, chosen_experts=2, expert_ranks=4, layer_tokens=100)
    found = parallel_layer(plan)
    expert = 3 * 4096 * 14336
    attention = 4096 * (4096 + 2 * 8 * 128) + 4096 * 4096
    assert found.parameters == 2 * expert + attention + 2 * 4096 + 4096 * 8
    (sent,) = found.sent
    assert (sent.calls, sent.bytes) == (4, 4 * 2 * 100 * 4096 * 2 * 3 // 4)


@pytest.mark.parametrize(
    "wrong", [{"layer_heads": 30}, {"tensor_ranks": 3}, {"layer_experts": 6, "expert_ranks": 4}, {"layer_tokens": 8191}]
)
def test_ranks_that_do_not_divide_are_named(wrong):
    with pytest.raises(InputError, match="multiple of"):
        parallel_layer(ParallelLayerPlan(**wrong))


def test_a_layer_s_operations_are_those_of_its_matrices():
    h100 = gpu("h100-sxm-80gb")
    found = layer_roofline(LayerRooflinePlan(sequences=1, cached_tokens=1), h100)
    weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert sum(each.flops for each in found.operations if each.name != "attention") == 2 * weights
    assert all(not each.compute_bound for each in found.operations)  # one token: every weight is read for two FLOPs
    many = layer_roofline(LayerRooflinePlan(sequences=4096, cached_tokens=4096), h100)
    assert {each.name: each.compute_bound for each in many.operations}["down"]
    attention = many.operations[1]
    assert attention.name == "attention"
    assert not attention.compute_bound  # its intensity does not grow with the batch
    assert found.attainable(found.ridge) == pytest.approx(h100.peak_flops("bf16"), rel=1e-12)
    with pytest.raises(InputError, match="query_heads"):
        layer_roofline(LayerRooflinePlan(query_heads=33), h100)


def test_fp16_loses_gradients_below_half_of_its_smallest_number():
    none, scaled_up = scaled(1e-7)[0], scaled(1e-7)[16]
    drawn = 1e-7 * np.exp(3.0 * np.random.default_rng(0).standard_normal(20_000))
    assert none.zero == np.mean(drawn <= 2.0**-25)
    assert scaled_up.zero == np.mean(drawn * 2**16 <= 2.0**-25)
    assert scaled(1e-7)[30].infinite == np.mean(drawn * 2**30 >= 65520)


def test_a_step_below_half_of_the_spacing_changes_nothing():
    """At 1 the spacing is 2^-7 in bf16 and 2^-10 in fp16."""
    found = summed(HalfPrecisionPlan(weight_step=0.0002, weight_steps=500))
    assert found["bf16"] == found["fp16"] == 1.0
    assert found["fp32"] == pytest.approx(1.1, abs=500 * 2.0**-24)
    value = np.float16(1)
    for _ in range(300):
        value = np.float16(value + np.float16(0.001))
    by_fp16 = summed(HalfPrecisionPlan(weight_step=float(np.float16(0.001)), weight_steps=300))["fp16"]
    assert by_fp16 == float(value)


def test_parts_cost_what_well_known_models_have():
    """GPT-2: 25 LayerNorms of 768 and 1024 positions; Llama-2-7B: 65 RMSNorms of 4096 and gated MLPs."""
    gpt2 = {
        each.name: each
        for each in parts_by_cost(PartsByCostPlan(model_width=768, mlp_width=3072, model_layers=12, positions=1024))
    }
    assert (gpt2["LayerNorm"].parameters, gpt2["learned"].parameters) == (25 * 2 * 768, 786_432)
    assert gpt2["ReLU or GELU"].parameters == 12 * (768 * 3072 + 3072 * 768)
    llama = {each.name: each for each in parts_by_cost(PartsByCostPlan())}
    assert llama["RMSNorm"].parameters == 266_240
    assert llama["SwiGLU or GeGLU"].parameters == 32 * 3 * 4096 * 11008 == 4_328_521_728
    assert llama["T5 buckets"].parameters == 32 * 32


def test_a_budget_by_each_fit():
    found = compute_budget(ComputeBudgetPlan())
    refit = found["chinchilla-refit"]
    assert refit.params == pytest.approx(72.2e9, rel=2e-3)
    assert found["chinchilla"].params == pytest.approx(32.2e9, rel=2e-3)
    for answer in found.values():
        assert 6 * answer.params * answer.tokens == pytest.approx(5.76e23, rel=1e-6)
    assert len(found) >= 4
    points = above_best(refit)
    assert min(loss for _, loss in points) == pytest.approx(0, abs=1e-9)
    assert all(loss > 1e-3 for params, loss in points if not 0.3 < params / refit.params < 3)
    assert above_best(found["kaplan"]) == ()
