"""The machine around a GPU: links, sustained rates, the host; each against arithmetic of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calc.catalogue import load
from calc.communication import CommunicationPlan, communication, network_note, topology_of
from calc.errors import InputError
from calc.hardware import gpu
from calc.kernel_times import kernel_times
from calc.pipeline import PipelinePlan, simulate
from calc.step_time import TimePlan, step_time
from calc.step_time.machine import half_rows, host_seconds, memory_factors, sustained
from calc.step_time.money import price_of

H100 = gpu("h100-sxm-80gb")
GiB = 2**30


def links(domain=None, intra=None, inter=None, device=H100):
    return topology_of(device, "measured", domain, intra, inter)


def test_a_collective_within_a_domain_is_the_kernels_own_and_across_it_carries_a_share_of_each_adapter():
    near = links().seconds("all_gather", GiB, 8)
    assert near == pytest.approx(float(kernel_times(H100).collective("all_gather", GiB, 8)))
    far = links().seconds("all_gather", GiB, 16)
    # 16 ranks on two nodes: each adapter carries an eighth of what its node lacks, at most at 50 GB/s
    assert far > max(near, GiB / 2 / 8 / 50e9)
    assert links(inter=5.0).seconds("all_gather", GiB, 16) > GiB / 2 / 8 / 5e9
    assert links().seconds("all_gather", GiB, 1) == 0


def test_ranks_that_lie_a_node_apart_have_one_adapter_each():
    spread, close = links().seconds("all_gather", GiB, 2, stride=8), links().seconds("all_gather", GiB, 2, stride=1)
    assert spread > GiB / 2 / 50e9 > close


def test_a_slower_link_slows_the_domain_and_a_larger_domain_needs_no_network():
    assert links(intra=45.0).seconds("all_gather", GiB, 8) > 5 * links().seconds("all_gather", GiB, 8)
    gb200 = gpu("gb200-186gb")
    assert (
        network_note(gb200, links(device=gb200), 64, None) == network_note(gb200, links(device=gb200), 144, 50.0) == ()
    )
    assert network_note(gb200, links(device=gb200), 144, None)[0].startswith(
        "inter_GBps: 50 GB/s a GPU between nodes of 72"
    )


def test_a_gpu_without_known_links_trains_alone_or_with_the_link_that_is_given():
    card, spec = replace(gpu("rtx-4090-24gb"), pcie_bandwidth=None), load("smollm2-135m")
    assert step_time(spec, TimePlan(), card).step_seconds > 0
    with pytest.raises(InputError, match="intra-GBps"):
        _ = step_time(spec, TimePlan(dp=2), card).step_seconds
    assert step_time(spec, TimePlan(dp=2, intra_GBps=20.0), card).step_seconds > 0


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-180gb"])
def test_large_products_run_no_faster_than_the_sustained_rate(name):
    """A step of one huge layer's products cannot beat the published rate; without it the peak is the bound."""
    device, spec = gpu(name), load("meta-llama-3-70b")
    answer = step_time(spec, TimePlan(seq=8192, recipe="megatron-bf16", implementation="fused"), device)
    seconds = answer.step.busiest.layers.forward.families["gemms"]
    flops = sum(
        count * sum(g.flops for g in one.gemms)
        for one, count in zip(answer.step.operations, spec.layers.counts, strict=True)
    )
    found = sustained(device, "bf16")
    assert found
    assert flops / seconds <= found.tflops * 1e12 * (1 + 1e-9)


def test_figures_without_a_source_change_nothing():
    card = gpu("rtx-4090-24gb")
    assert sustained(card, "bf16") is None
    assert memory_factors(kernel_times(card)) == (1.0, 1.0, 1.0)
    assert host_seconds(kernel_times(H100, "roofline")) == 0.0
    assert half_rows(card) == half_rows(gpu("a100-sxm-80gb"))


def test_adapters_and_four_bit_weights_cost_time_of_their_own():
    spec = load("llama-3.2-1b")
    plain = step_time(spec, TimePlan(), H100).step.busiest.layers.forward
    lora = step_time(spec, TimePlan(method="lora"), H100).step.busiest.layers.forward
    every = step_time(spec, TimePlan(method="lora", lora_targets="all-linear"), H100).step.busiest.layers.forward
    qlora = step_time(spec, TimePlan(method="qlora"), H100).step.busiest.layers.forward
    assert plain.total < lora.total < every.total < qlora.total


@pytest.mark.parametrize(("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_the_bubble_is_what_the_simulation_finds_for_the_stages_own_seconds(schedule, v):
    spec = load("meta-llama-3.1-405b")
    plan = TimePlan(
        tp=8,
        pp=8,
        virtual_stages=v,
        schedule=schedule,
        global_batch=64,
        zero=1,
        recipe="megatron-bf16",
        implementation="fused",
    )
    step = step_time(spec, plan, gpu("h200-141gb")).step
    forward = tuple(rank.forward for rank in step.ranks)
    backward = tuple(rank.whole - rank.forward for rank in step.ranks)
    found = simulate(
        PipelinePlan(
            schedule=schedule,
            stages=8,
            microbatches=64,
            virtual_stages=v,
            forward=forward,
            backward_input=backward,
            backward_weight=0,
        )
    )
    whole = plan.microbatches * step.busiest.whole + step.bubble
    assert whole == pytest.approx(found.makespan, rel=0.02)


def test_a_price_is_the_users_or_a_dated_public_one():
    assert price_of(H100, 1.5).dollars == 1.5
    assert "2026" in price_of(H100, None).source
    assert price_of(gpu("v100-sxm-32gb"), None).dollars is None
    assert price_of(H100, 0.0).dollars == 0.0


@pytest.mark.parametrize(("name", "tp", "ep"), [("meta-llama-3-8b", 8, 1), ("gpt-j-6b", 4, 1), ("qwen3-30b-a3b", 4, 2)])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layers_collectives_take_as_long_as_communication_says(name, tp, ep, sequence_parallel):
    """Tensor and expert parallelism without overlap, on one node; `communication` works in bytes of exact tensors. It has one gather more a
    block, Megatron's for the weight's gradient, which runs under the product for the input's."""
    spec = load(name)
    layout = {"tp": tp, "dp": 8 // tp, "ep": ep, "zero": 1, "recipe": "megatron-bf16", "implementation": "fused"}
    layout["sequence_parallel"] = sequence_parallel
    mine = step_time(spec, TimePlan(**layout, tp_overlap=False), H100).step.busiest.exposed
    theirs = communication(spec, CommunicationPlan(**layout), H100)
    for group, key in (("tp", "tensor"), ("ep", "expert")):
        seconds = sum(
            each.seconds
            * (2 / 3 if each.collective.kind == "all_gather" and "tensor parallel" in each.collective.name else 1)
            for each in theirs.collectives
            if each.collective.group.name == group
        )
        assert mine.get(key, 0.0) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("how", ["all-gather", "all-to-all"])
def test_context_parallel_exchanges_that_nothing_hides_take_as_long_as_communication_says(how):
    spec, layout = (
        load("meta-llama-3-8b"),
        {"cp": 8, "zero": 1, "recipe": "megatron-bf16", "implementation": "fused", "seq": 32768},
    )
    mine = step_time(spec, TimePlan(**layout, context_exchange=how), H100).step.busiest
    theirs = communication(spec, CommunicationPlan(**layout, context_exchange=how), H100)
    seconds = sum(each.seconds for each in theirs.collectives if each.collective.group.name == "cp")
    assert mine.exposed["context"] == pytest.approx(seconds)
    ring = step_time(spec, TimePlan(**layout), H100).step.busiest
    assert ring.exposed["context"] < mine.exposed["context"]
    assert ring.hidden > mine.hidden
