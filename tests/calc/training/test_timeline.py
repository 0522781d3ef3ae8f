"""The step's timeline, segment by segment, against the peak that the answer states and the step's own order."""

from itertools import pairwise

import pytest

from calc.catalogue import load
from calc.hardware import gpu
from calc.training import TrainingPlan, train

PLANS = [
    {},
    {"recompute": "full"},
    {"recipe": "amp", "optimizer_kernel": "fused"},
    {"dp": 8, "zero": 3},
    {"dp": 8, "zero": 3, "recompute": "full", "recipe": "fsdp-bf16"},
    {"dp": 8, "zero": 1, "micro_batch": 2},
    {"pp": 4, "global_batch": 8},
    {"method": "qlora", "lora_targets": ("q_proj", "v_proj"), "recompute": "full"},
    {"objective": "dpo"},
    {"implementation": "fused", "recipe": "megatron-bf16", "tp": 4, "recompute": "full"},
]


@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen3-30b-a3b", "gpt2"])
@pytest.mark.parametrize("values", PLANS, ids=str)
def test_the_highest_stop_is_the_peak_and_has_its_parts(model, values):
    if model == "gpt2" and (values.get("tp") or values.get("method")):
        values = {name: value for name, value in values.items() if name in ("recompute", "recipe")}
    answer = train(load(model), TrainingPlan.model_validate({"seq": 512, **values}), gpu("h100-sxm-80gb"))
    stops = list(answer.timeline())
    highest = max(stops, key=lambda stop: sum(stop[1].values()))
    assert sum(highest[1].values()) == answer.peak_bytes
    assert highest[0].partition(",")[0] == answer.peak_phase
    for phase, size in answer.phases.items():
        assert max(sum(parts.values()) for name, parts in stops if name.partition(",")[0] == phase) <= size


def test_stops_are_in_the_order_of_the_step_and_what_forward_keeps_grows():
    answer = train(load("llama-3.2-1b"), TrainingPlan(seq=512), gpu("h100-sxm-80gb"))
    names = [name for name, _ in answer.timeline()]
    assert names[0] == "forward, embedding"
    assert names[1] == "forward, layer 1 of 16"
    assert names[-1] == "step"
    assert names[-2] == "backward, embedding"
    kept = [parts["segments"] for name, parts in answer.timeline() if name.startswith("forward, layer")]
    steps = {after - before for before, after in pairwise(kept)}
    assert len(steps) == 1  # each layer keeps as much as the last
    assert steps.pop() > 0
