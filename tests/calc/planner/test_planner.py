"""The planner against a scan that tries every layout one by one, and its answers to hopeless questions."""

from __future__ import annotations

from itertools import product

import pytest

from calc.catalogue import load
from calc.errors import InputError
from calc.hardware import custom_gpu, gpu
from calc.model.feed_forward import MoE
from calc.planner import SearchPlan, search
from calc.step_time import TimePlan, step_time
from calc.training import train

H100 = gpu("h100-sxm-80gb")


def scan(spec, plan, device):
    """Every layout of `plan.gpus` GPUs by plain loops: what train and time refuse is no layout."""
    found = []
    virtual = (1, 2, 3, 4, 5, 6, 8, 10, 12)
    layers = spec.num_hidden_layers
    numbers = range(1, plan.gpus + 1)
    for tp, pp, cp in product(numbers, numbers, (1, 2, 4, 8)):
        if plan.gpus % (tp * pp * cp) or tp > 8:
            continue
        dp = plan.gpus // (tp * pp * cp)
        for ep, micro, zero, again, v in product(
            numbers, range(1, plan.global_batch + 1), (1, 3), ("none", "full"), virtual
        ):
            if (pp == 1 and v > 1) or (v > 1 and layers % (pp * v)) or (zero == 3 and (pp > 1 or dp * cp == 1)):
                continue
            if (cp > 1 and plan.seq // cp < 512) or (pp > 1 and plan.global_batch // (micro * dp) < pp):
                continue
            try:
                layout = TimePlan(
                    tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, micro_batch=micro, zero=zero, recompute=again, virtual_stages=v,
                    schedule="interleaved" if v > 1 else "1f1b", seq=plan.seq, global_batch=plan.global_batch,
                    recipe="megatron-bf16", implementation="fused", optimizer_kernel="fused",
                )  # fmt: skip
                if not train(spec, layout, device).fits:
                    continue
                seconds = step_time(spec, layout, device).step_seconds
            except ValueError:
                continue
            found.append((seconds, (tp, pp, v, cp, ep, dp, zero, micro, again, 1, "none")))
    return sorted(found)


def scan_sharded(spec, plan, device):
    """The same for programs without a pipeline that shard weights over all ranks or within a node, and may keep states on the host."""
    titan = plan.implementation == "torchtitan"
    dense = not any(isinstance(kind.feed_forward, MoE) for kind in spec.layers.kinds)
    found = set()
    numbers = range(1, plan.gpus + 1)
    for tp, cp, ep, micro in product(numbers, (1, 2, 4), numbers, range(1, plan.global_batch + 1)):
        if plan.gpus % (tp * cp) or tp > plan.gpus_per_node or (not titan and tp * ep > 1):
            continue
        dp = plan.gpus // (tp * cp)
        if plan.global_batch % (micro * dp):
            continue
        for zero, again, offload, copies in product(
            (3,) if titan else (0, 1, 2, 3), ("none", "selective", "full"), ("none", "optimizer"), numbers
        ):
            nodes = tp * cp * dp // plan.gpus_per_node
            if copies > 1 and (zero < 3 or copies != nodes or dp % copies or dp * cp == copies):
                continue
            if (
                (dense and ep > 1)
                or (titan and offload != "none")
                or (not titan and again == "selective")
                or (dp * cp == 1 and zero > (3 if titan else 0))
            ):
                continue
            if (cp > 1 and plan.seq // cp < 512) or (titan and dp * cp == 1):
                continue
            try:
                layout = TimePlan(
                    tp=tp, cp=cp, dp=dp, ep=ep, micro_batch=micro, zero=zero, recompute=again, dp_replicate=copies, offload=offload,
                    seq=plan.seq, global_batch=plan.global_batch, recipe=plan.used_recipe, implementation=plan.implementation,
                    optimizer_kernel="fused" if titan else "foreach", gpus_per_node=plan.gpus_per_node,
                )  # fmt: skip
                if not train(spec, layout, device).fits:
                    continue
                seconds = step_time(spec, layout, device).step_seconds
            except ValueError:
                continue
            found.add((seconds, (tp, 1, 1, cp, ep, dp, zero, micro, again, copies, offload)))
    return sorted(found)


@pytest.mark.parametrize(
    ("program", "name", "memory_gib"), [("torchtitan", "meta-llama-3-8b", 80.0), ("liger", "llama-3.2-1b", 20.0)]
)
def test_sharding_within_nodes_and_states_on_the_host_are_scanned_too(program, name, memory_gib):
    spec, device = load(name), custom_gpu(memory_gib=memory_gib, base=H100)
    plan = SearchPlan(gpus=4, gpus_per_node=2, global_batch=4, seq=2048, implementation=program)
    answer = search(spec, plan, device)
    assert answer.exact
    wanted = scan_sharded(spec, plan, device)
    assert {key[-2] for _, key in wanted} == {1, 2}
    assert {key[-1] for _, key in wanted} == ({"none"} if program == "torchtitan" else {"none", "optimizer"})
    assert [(one.time.step_seconds, one.key) for one in answer.layouts] == wanted


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "seq", "memory_gib"),
    [("smollm2-135m", 4, 8, 2048, 80.0), ("llama-3.2-1b", 4, 4, 4096, 24.0), ("gpt-oss-20b", 4, 4, 2048, 180.0)],
)
def test_the_ranking_is_that_of_a_scan_of_every_layout(name, gpus, batch, seq, memory_gib):
    spec, device = load(name), custom_gpu(memory_gib=memory_gib, base=H100)
    plan = SearchPlan(gpus=gpus, global_batch=batch, seq=seq)
    answer = search(spec, plan, device)
    assert answer.exact
    wanted = scan(spec, plan, device)
    assert wanted
    assert [(one.time.step_seconds, one.key) for one in answer.layouts] == wanted


def test_every_layout_considered_fits_or_has_its_reason():
    answer = search(load("smollm2-135m"), SearchPlan(gpus=4, global_batch=8, seq=2048), H100)
    assert answer.considered == answer.fitting + sum(answer.rejected.values())


def test_the_chosen_layouts_of_a_large_space_are_worked_out_and_the_rest_is_said():
    answer = search(load("qwen3-30b-a3b"), SearchPlan(gpus=64, global_batch=512), H100)
    assert not answer.exact
    assert answer.layouts == tuple(sorted(answer.layouts, key=lambda one: one.time.step_seconds))
    assert any("most promising" in note for note in answer.as_json()["notes"])
    assert answer.layouts[0].as_json(answer.layouts[0])["slower_by"] == ""


def test_what_cannot_fit_is_an_answer_with_reasons():
    answer = search(load("meta-llama-3.1-405b"), SearchPlan(gpus=1, global_batch=1), H100)
    assert answer.layouts == ()
    assert answer.rejected["weights and states alone exceed the memory"] > 0
    assert answer.as_json()["components"] == []
    assert answer.breakdown.total == 0


def test_memory_ranks_by_bytes_and_cost_chooses_the_count():
    spec = load("llama-3.2-1b")
    small = search(spec, SearchPlan(gpus=4, global_batch=4, sort="memory"), H100).layouts
    assert [one.driver_bytes for one in small] == sorted(one.driver_bytes for one in small)
    run = {"most_gpus": 16, "global_batch": 16, "tokens": 10**9}
    cheap = search(spec, SearchPlan(deadline_hours=1e6, **run), H100).layouts
    hurried = search(spec, SearchPlan(deadline_hours=cheap[0].time.run.seconds / 3600 / 4, **run), H100).layouts
    assert hurried[0].plan.gpus > cheap[0].plan.gpus
    assert hurried[0].time.run.cost >= cheap[0].time.run.cost


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "deadline_hours or budget"),
        ({"deadline_hours": 1.0}, "give its tokens"),
        ({"gpus": 0}, "greater than or equal"),
    ],
)
def test_a_question_without_its_facts_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SearchPlan(**given)


def test_a_gpu_is_needed():
    with pytest.raises(InputError, match="gpu: none is given"):
        search(load("gpt2"), SearchPlan(gpus=1))


def test_the_best_of_a_large_space_is_no_slower_than_the_layout_of_a_public_run():
    """Megatron-Bridge trains it on eight GB300 with all experts divided over them."""
    spec, device = load("qwen3-30b-a3b"), gpu("gb300-288gb")
    run = {"seq": 4096, "global_batch": 512, "matmul": "mxfp8", "recipe": "megatron-bf16", "implementation": "fused"}
    best = search(spec, SearchPlan(gpus=8, **run), device).layouts[0]
    used = TimePlan(dp=8, ep=8, zero=1, micro_batch=4, optimizer_kernel="fused", **run)
    assert train(spec, used, device).fits
    assert best.time.step_seconds <= step_time(spec, used, device).step_seconds
