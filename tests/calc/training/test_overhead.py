"""CUDA and framework overhead: workspaces, and the pools of streams."""

from __future__ import annotations

import pytest

from calc.hardware import gpu
from calc.training import TrainingPlan, train
from calc.units import MiB
from tests.calc.training.models import model


@pytest.mark.parametrize(
    ("name", "implementation", "model_name", "mebibytes"),
    [
        ("h100-sxm-80gb", "hf", "llama-2-7b", 64),
        ("h100-sxm-80gb", "fused", "llama-2-7b", 96),
        ("h100-sxm-80gb", "fused", "mixtral-8x7b-v0.1", 224),
        ("a100-sxm-80gb", "hf", "llama-2-7b", 16.25),
        ("a100-sxm-80gb", "fused", "llama-2-7b", 20.25),
        ("a100-sxm-80gb", "fused", "mixtral-8x7b-v0.1", 36.25),
    ],
)
def test_each_thread_and_transformer_engine_have_a_workspace(name, implementation, model_name, mebibytes):
    plan = TrainingPlan(seq=512, implementation=implementation)
    assert train(model(model_name), plan, gpu(name)).overhead.workspace == mebibytes * MiB


FSDP = {"seq": 2048, "dp": 8, "zero": 3, "recipe": "fsdp-bf16"}


def test_what_streams_of_fsdp_hold_idle_is_reserved_at_the_peak():
    """At the loss no gradient has its shard yet, and no gather runs: the root's buffer and a layer's are idle."""
    answer = train(model("llama-2-7b"), TrainingPlan(**FSDP, micro_batch=4))
    assert answer.worst.peak == ("backward", answer.worst.moments["backward"])
    assert answer.worst.segments[answer.worst.peak[1].segment].path == ("end",)
    layer, root = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096, 2 * 32000 * 4096 + 4096
    gathers = 2 * (root + layer)
    _, buffers = answer.worst.full_weights.sizes("backward", answer.worst.peak[1].segment, answer.worst.peak[1].at)
    assert answer.worst.idle_pools == answer.gradients_bytes + gathers - buffers


def test_each_pool_is_held_at_its_own_highest_point():
    """At the first layer's backward most gradients have their shards, which is the highest point of all; the stream that
    computes had its own at the loss: two gradients of the logits on top of what forward kept, where the loss's gradient takes
    the place of the count of labels."""
    plan = {"implementation": "torchtitan", "recompute": "full", "micro_batch": 2, "optimizer_kernel": "fused"}
    memory = train(model("qwen3-32b"), TrainingPlan(**(FSDP | plan | {"seq": 4096}))).worst
    assert memory.peak[1].segment == 1
    at_the_loss = memory.states[0] + memory.states[2] + memory.activations + 2 * 4 * 2 * 4096 * 151936
    assert memory.idle_pools == at_the_loss + memory.states[1] + memory.full_weights.pool - memory.peak[1].bytes


@pytest.mark.parametrize("changes", [{"zero": 2}, {"dp": 1}, {"implementation": "fused", "recipe": "megatron-bf16"}])
def test_without_fsdp_no_stream_has_a_pool_of_its_own(changes):
    assert train(model("llama-2-7b"), TrainingPlan(**(FSDP | changes))).worst.idle_pools == 0


def test_the_upper_bound_takes_the_highest_context_and_fragmentation_unless_they_are_given():
    answer = train(model("llama-2-7b"), TrainingPlan(seq=1024))
    context, fragmentation = 256 * MiB, answer.peak_bytes * 16 // 100 - answer.worst.replayed
    assert answer.driver_upper_bytes == answer.driver_bytes + context + fragmentation
    own = train(model("llama-2-7b"), TrainingPlan(seq=1024, context_mib=1, fragmentation_percent=1))
    assert own.driver_upper_bytes == own.driver_bytes


def test_a_measured_fragmentation_holds_all_that_is_reserved_and_not_allocated():
    answer = train(model("llama-2-7b"), TrainingPlan(**FSDP, fragmentation_percent=10))
    assert answer.overhead.fragmentation == answer.peak_bytes // 10


def test_unfused_attention_has_a_buffer_of_scores():
    plans = [TrainingPlan(seq=1024, micro_batch=2, tp=4, implementation=name) for name in ("fused", "paper")]
    fused, paper = (train(model("llama-2-7b"), plan, gpu("h100-sxm-80gb")).overhead.workspace for plan in plans)
    assert (fused, paper) == (96 * MiB, 64 * MiB + 2 * 2 * (32 // 4) * 1024**2)
