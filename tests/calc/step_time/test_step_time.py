"""A step's seconds: parts that sum, work that is counted whole, layouts that cost what they must."""

from __future__ import annotations

import pytest

from calc.catalogue import load
from calc.communication import CommunicationPlan, communication
from calc.errors import InputError
from calc.flops import token_flops
from calc.hardware import gpu
from calc.step_time import TimePlan, step_time
from calc.step_time.labels import part_label
from calc.step_time.operations import Sharding, head_gemms, stack_operations

H100 = gpu("h100-sxm-80gb")


@pytest.fixture(scope="module")
def llama():
    return load("meta-llama-3-8b")


def test_the_leaves_sum_to_the_step(llama):
    answer = step_time(llama, TimePlan(dp=8, zero=3, recipe="fsdp-bf16", micro_batch=2), H100)
    assert sum(row.value for row in answer.breakdown.rows()) == pytest.approx(answer.step_seconds, rel=1e-12)
    assert answer.low < answer.step_seconds < answer.high


@pytest.mark.parametrize("name", ["meta-llama-3-8b", "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b-v0.1", "gemma-2-9b"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_all_ranks_together_multiply_every_weight_of_the_model(name, tp, ep):
    """The products of tp ranks hold as many FLOPs as the exact count of one token's matrix products has for all tokens."""
    spec = load(name)
    if ep > 1 and not any(hasattr(kind.feed_forward, "num_experts") for kind in spec.layers.kinds):
        pytest.skip("no experts")
    seq = 4096
    sharding = Sharding(seq, tp=tp, ep=ep, sequence_parallel=tp > 1)
    layers = stack_operations(spec, seq, sharding)
    found = tp * sum(
        count * sum(gemm.flops for gemm in one.gemms) for one, count in zip(layers, spec.layers.counts, strict=True)
    )
    found += tp * sum(gemm.flops for gemm in head_gemms(spec, sharding))
    one = token_flops(spec, seq, causal=True)
    wanted = (one.forward - one.attention) * seq
    assert found == pytest.approx(wanted, rel=2e-3)  # heads and rows are rounded up to whole ones


def test_whole_experts_over_tp_multiply_as_much_and_send_more():
    spec = load("qwen3-30b-a3b")
    plan = {"tp": 2, "dp": 4, "ep": 4, "zero": 1, "recipe": "megatron-bf16", "implementation": "fused"}
    split, whole = (step_time(spec, TimePlan(ep_over_tp=over, **plan), H100).step for over in (False, True))
    work = [
        sum(gemm.flops for one in step.operations for gemm in one.gemms if gemm.part == "experts")
        for step in (split, whole)
    ]
    assert work[0] == work[1]
    assert whole.operations[0].expert_parameters == split.operations[0].expert_parameters
    assert whole.busiest.exposed["expert"] > split.busiest.exposed["expert"]
    assert whole.busiest.exposed["tensor"] < split.busiest.exposed["tensor"]


def test_a_slow_ring_passes_the_keys_and_values_of_each_other_rank_once_forward_and_twice_backward():
    """Where links are so slow that attention hides a constant part, what half the speed adds is the messages' own time."""
    spec, cp = load("meta-llama-3-8b"), 4
    layout = {"cp": cp, "context_exchange": "ring", "seq": 8192, "recipe": "megatron-bf16", "implementation": "fused"}
    plans = [TimePlan(**layout, intra_GBps=g) for g in (1, 0.5)]
    steps = [step_time(spec, plan, H100).step for plan in plans]
    size = 2 * (8192 // cp) * 8 * (128 + 128)
    once = [step.topology.seconds("send", size, 2, cp - 1) for step in steps]
    exposed = [step.busiest.exposed["context"] for step in steps]
    assert exposed[1] - exposed[0] == pytest.approx(3 * 32 * (cp - 1) * (once[1] - once[0]), rel=1e-9)


@pytest.mark.parametrize("how", ["all-gather", "all-to-all"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_contexts_exchange_takes_as_long_as_communication_has_it_where_nothing_hides_it(how, recompute):
    spec = load("deepseek-v3")
    run = {
        "cp": 4, "context_exchange": how, "seq": 8192, "recipe": "megatron-bf16", "implementation": "fused", "recompute": recompute,
    }  # fmt: skip
    apart = [
        each.seconds
        for each in communication(spec, CommunicationPlan(**run), H100).collectives
        if each.collective.group.name == "cp"
    ]
    exposed = step_time(spec, TimePlan(**run), H100).step.busiest.exposed["context"]
    assert exposed == pytest.approx(sum(apart), rel=1e-12)


def test_an_overlapped_exchange_leaves_the_first_and_the_last_exposed_and_slows_what_hides_it():
    spec = load("qwen3-30b-a3b")
    plan = {
        "dp": 8,
        "ep": 8,
        "zero": 1,
        "recipe": "megatron-bf16",
        "implementation": "fused",
        "global_batch": 64,
        "cuda_graphs": "full",
    }
    plain, over = (step_time(spec, TimePlan(ep_overlap=over, **plan), H100).step.busiest for over in (False, True))
    assert over.exposed["expert"] == pytest.approx(plain.exposed["expert"] / 8)
    assert over.hidden == pytest.approx(plain.hidden + plain.exposed["expert"] * 7 / 8)
    assert over.whole < plain.whole


def test_multi_token_prediction_adds_a_layer_a_head_and_the_joining_product_to_the_last_rank():
    spec = load("deepseek-v3")
    plan = {
        "pp": 16,
        "dp": 8,
        "ep": 8,
        "zero": 1,
        "recipe": "megatron-bf16",
        "implementation": "fused",
        "global_batch": 128,
    }
    plan |= {"cuda_graphs": "full"}
    plain, more = (step_time(spec, TimePlan(mtp_layers=count, **plan), gpu("h200-141gb")).step for count in (0, 1))
    assert [rank.total for rank in more.ranks[:-1]] == [rank.total for rank in plain.ranks[:-1]]
    layer, head, joining = plain.kinds[-1].forward.total, plain.head.forward.total, more.joining.forward.total
    added = more.ranks[-1].layers.forward.total + more.ranks[-1].ends.forward.total
    added -= plain.ranks[-1].layers.forward.total + plain.ranks[-1].ends.forward.total
    assert added == pytest.approx(layer + head + joining)
    flops = 2 * 4096 * 2 * 7168 * 7168
    assert flops / joining < 989e12


def test_megatrons_own_router_and_dispatcher_launch_more_than_fused_ones():
    spec = load("qwen3-30b-a3b")
    plan = {"dp": 8, "ep": 8, "zero": 1, "recipe": "megatron-bf16", "implementation": "fused"}
    plain, fused = (step_time(spec, TimePlan(ep_dispatch=how, **plan), H100).step for how in ("all-to-all", "fused"))
    more = plain.kinds[0].forward.kernels - fused.kinds[0].forward.kernels
    assert more == 33 - 4
    assert plain.kinds[0].forward.expert_kernels - fused.kinds[0].forward.expert_kernels == 24 - 4
    assert plain.busiest.host > fused.busiest.host


def test_torchtitans_float8_and_compilation_change_products_gathers_and_loss(llama):
    titan = {"implementation": "torchtitan", "recipe": "fsdp-bf16", "zero": 3, "dp": 64, "seq": 8192}
    plans = [
        {},
        {"compile": ("model",)},
        {"compile": ("model", "loss")},
        {"compile": ("model",), "float8": "tensorwise"},
    ]
    plans.append(plans[-1] | {"float8_all_gather": True})
    plain, layers, loss, narrow, gathered = (step_time(llama, TimePlan(**titan, **more), H100).step for more in plans)
    assert layers.kinds[0].forward.families["memory_bound"] < plain.kinds[0].forward.families["memory_bound"]
    assert layers.head.forward.total == plain.head.forward.total > loss.head.forward.total
    assert narrow.kinds[0].forward.families["gemms"] < layers.kinds[0].forward.families["gemms"]
    assert gathered.busiest.shared.forward < narrow.busiest.shared.forward
    with pytest.raises(ValueError, match="by compile model"):
        TimePlan(**titan, compiled=True)
    with pytest.raises(ValueError, match="means fp8"):
        TimePlan(**titan, **plans[3], matmul="bf16")


def test_one_recomputed_layer_of_so_many_costs_its_share(llama):
    titan = {"implementation": "torchtitan", "recipe": "fsdp-bf16", "zero": 3, "dp": 8, "recompute": "full"}
    all_, half = (step_time(llama, TimePlan(**titan, recompute_every=every), H100) for every in (1, 2))
    assert half.step.busiest.layers.again.total == pytest.approx(all_.step.busiest.layers.again.total / 2)
    assert half.hfu / half.mfu - 1 == pytest.approx((all_.hfu / all_.mfu - 1) / 2)


def test_without_overlap_the_reduction_and_the_gather_are_exposed_whole(llama):
    plan = {"dp": 8, "zero": 1, "recipe": "megatron-bf16", "implementation": "fused"}
    over, apart = (step_time(llama, TimePlan(dp_overlap=value, **plan), H100).step for value in (True, False))
    shared = apart.busiest.shared
    assert apart.reduced == (shared.reduce_once + shared.gather_once, 0.0)
    assert sum(over.reduced) == pytest.approx(sum(apart.reduced))
    assert over.reduced[0] < apart.reduced[0]
    assert "dp_overlap" in TimePlan().idle


def test_twice_the_gpus_halve_the_micro_batches_and_nearly_the_time(llama):
    plan = {"zero": 1, "recipe": "megatron-bf16", "implementation": "fused", "global_batch": 64}
    one, two = (step_time(llama, TimePlan(dp=dp, **plan), H100).step_seconds for dp in (8, 16))
    assert 0.5 * one < two < 0.6 * one


def test_full_recomputation_adds_one_forward_of_the_layers(llama):
    plan = {"dp": 8, "zero": 3, "recipe": "fsdp-bf16"}
    plain, again = (step_time(llama, TimePlan(recompute=how, **plan), H100) for how in ("none", "full"))
    layers = plain.step.busiest.layers
    assert again.step.busiest.layers.again.total == pytest.approx(layers.forward.total)
    assert again.hfu / again.mfu == pytest.approx(
        1 + token_flops(llama, 4096, True).layers / (3 * token_flops(llama, 4096, True).forward)
    )
    assert plain.hfu == pytest.approx(plain.mfu)


def test_frozen_weights_have_no_gradient_of_their_own(llama):
    full = step_time(llama, TimePlan(), H100).step.busiest.layers
    adapters = step_time(llama, TimePlan(method="lora"), H100).step.busiest.layers
    assert adapters.weight_gradient.total == 0 < full.weight_gradient.total
    assert adapters.input_gradient.families["gemms"] == full.input_gradient.families["gemms"]


def test_narrow_formats_are_faster_and_refused_where_the_gpu_lacks_them(llama):
    seconds = [
        step_time(llama, TimePlan(implementation="fused", recipe="megatron-bf16", matmul=name), H100).step_seconds
        for name in ("bf16", "fp8")
    ]
    assert seconds[1] < seconds[0]
    with pytest.raises(InputError, match="fp8 needs compute capability"):
        _ = step_time(llama, TimePlan(matmul="fp8"), gpu("a100-sxm-80gb")).step_seconds


def test_a_network_of_half_the_speed_costs_time_only_across_domains(llama):
    def seconds(dp, rate):
        plan = TimePlan(dp=dp, zero=3, recipe="fsdp-bf16", inter_GBps=rate)
        return step_time(llama, plan, H100).step_seconds

    assert seconds(8, 5.0) == seconds(8, 50.0)
    assert seconds(16, 5.0) > 1.5 * seconds(16, 50.0)


def test_the_pipeline_waits_for_its_busiest_stage():
    spec = load("meta-llama-3.1-405b")
    plan = {"tp": 8, "pp": 8, "global_batch": 64, "implementation": "fused", "recipe": "megatron-bf16", "zero": 1}
    once = step_time(spec, TimePlan(**plan), gpu("h200-141gb"))
    interleaved = step_time(spec, TimePlan(schedule="interleaved", virtual_stages=2, **plan), gpu("h200-141gb"))
    assert interleaved.step.bubble == pytest.approx(once.step.bubble / 2, rel=0.05)
    others = sum(rank.whole for rank in once.step.ranks) - once.step.busiest.whole
    assert once.step.bubble == pytest.approx(others)


def test_roofline_is_the_fastest_of_all_sources(llama):
    plan = {"dp": 8, "zero": 3, "recipe": "fsdp-bf16"}
    measured, roofline = (step_time(llama, TimePlan(times=times, **plan), H100) for times in ("measured", "roofline"))
    assert roofline.step_seconds < measured.step_seconds
    assert (measured.source, roofline.source) == ("table h100-sxm-80gb", "roofline")


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        ("meta-llama-3-8b", {"pp": 64}, "must be at most num_hidden_layers"),
        ("meta-llama-3-8b", {"ep": 2, "dp": 2}, "has no experts"),
        ("meta-llama-3-8b", {"tp": 64}, "must divide num_attention_heads"),
        ("qwen3-30b-a3b", {"ep": 48, "dp": 48}, "must divide num_experts"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(name, plan, message):
    with pytest.raises(InputError, match=message):
        step_time(load(name), TimePlan(**plan), H100)


def test_a_run_costs_its_hours_and_loses_what_failures_and_checkpoints_take(llama):
    plan = TimePlan(dp=8, zero=3, recipe="fsdp-bf16", tokens=10**12, price_per_gpu_hour=2.0)
    run = step_time(llama, plan, H100).run
    assert run.gpu_hours == pytest.approx(run.seconds * 8 / 3600)
    assert run.cost == pytest.approx(2 * run.gpu_hours)
    # Young: sqrt(2 x checkpoint x time between failures), Daly: minus the checkpoint
    between = plan.gpu_failure_hours * 3600 / 8
    assert run.interval_seconds == pytest.approx((2 * run.checkpoint_seconds * between) ** 0.5 - run.checkpoint_seconds)
    assert 0.99 < run.useful < 1


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("layers/forward/gemms", "matrix multiplications, forward"),
        ("layers/recomputed/memory_bound", "operators bound by memory, computed again"),
        ("ends/weight_gradient/gemms", "matrix multiplications of embedding and head, gradients of weights"),
        ("layers/forward", "layers, forward"),
        ("ends", "embedding and head"),
        ("exposed_communication/data", "data parallelism: communication that nothing hides"),
        ("unheard_of/part", "unheard of › part"),
    ],
)
def test_a_part_has_a_name_in_plain_words(path, words):
    assert part_label(path) == words


def test_no_two_parts_of_a_step_have_one_name_and_none_is_shown_by_its_path():
    plan = TimePlan(
        dp=4, tp=2, pp=2, cp=2, ep=2, zero=1, global_batch=16, recompute="full", recipe="megatron-bf16", implementation="fused",
    )  # fmt: skip
    breakdown = step_time(load("deepseek-v3"), plan, H100).breakdown
    paths = [row.path.removeprefix("step/") for row in breakdown.rows()]
    names = [breakdown.label(path) for path in paths]
    assert len(set(names)) == len(paths)
    assert not [name for name in names if "›" in name or "_" in name or name.endswith(("gemms", "bound"))]
