"""What the Train and Fit pages say of an answer: parts that sum to the figure, in known colours; a verdict with its doubt."""

from __future__ import annotations

import pytest

from calc.catalogue import load
from calc.fit_matrix import COUNTS, Way, fit_matrix
from calc.hardware import gpu
from calc.training import TrainingPlan, train
from pages.ui import parts
from pages.ui.answers.training import AGAINST, verdict
from pages.ui.numbers import Numbers
from pages.ui.presets import WAYS

NUMBERS = Numbers("GiB")
PLANS = {
    "mixed": {"recipe": "amp"},
    "checkpointed": {"recipe": "amp", "recompute": "full", "optimizer_kernel": "fused"},
    "fsdp": {"recipe": "fsdp-bf16", "dp": 8, "zero": 3},
    "zero 1": {"recipe": "mixed-16", "dp": 4, "zero": 1},
    "pipeline": {"implementation": "fused", "recipe": "megatron-bf16", "pp": 4, "global_batch": 8},
    "qlora": {"method": "qlora", "recompute": "full", "lora_targets": ("q_proj", "v_proj")},
    "dpo": {"objective": "dpo", "method": "lora"},
    "grpo": {"objective": "grpo", "prompt_tokens": 512, "method": "lora"},
    "offload": {"offload": "optimizer", "recipe": "mixed-16"},
    "liger": {"implementation": "liger"},
    "titan": {"implementation": "torchtitan", "recipe": "fsdp-bf16", "dp": 8, "zero": 3},
}


def test_parts_on_screen_sum_to_what_the_gpu_shows_and_have_a_colour():
    wrong = []
    for model in ("llama-2-7b", "qwen3-8b", "qwen3-30b-a3b", "meta-llama-3.1-8b"):
        for name, plan in PLANS.items():
            answer = train(load(model), TrainingPlan(**plan), gpu("h200-141gb"))
            found = parts.of_worst_stage(answer)
            strange = [part for part, _ in found if part not in parts.COLOURS]
            if sum(value for _, value in found) != answer.driver_bytes or strange:
                wrong.append((model, name, strange))
    assert wrong == []


def test_a_verdict_doubts_what_fits_only_with_the_usual_overheads():
    plan = TrainingPlan(method="lora", seq=4096, implementation="liger", recompute="full")
    answers = [
        train(load("meta-llama-3.1-8b"), plan.model_copy(update={"micro_batch": b}), gpu("rtx-4090-24gb"))
        for b in range(1, 12)
    ]
    doubted = [verdict(each, NUMBERS) for each in answers if each.fits and not each.fits_at_most]
    assert all("but not with the highest overheads that were reported" in each.doubt for each in doubted)
    assert verdict(answers[-1], NUMBERS).fits is answers[-1].fits


def test_a_matrix_cell_is_what_the_answer_says_and_its_count_is_the_smallest():
    spec, device = load("meta-llama-3.1-8b"), gpu("a100-sxm-80gb")
    values = {"recipe": "amp", "recompute": "full", "optimizer_kernel": "fused"}
    [cell] = fit_matrix(spec, [Way("full", "train", values)], [device])
    assert cell.needed == train(spec, TrainingPlan(**values), device).driver_bytes
    assert cell.count is not None
    assert cell.count > 1
    fits = [
        train(spec, TrainingPlan(**values, dp=n, zero=3 if n > 1 else 0), device).fits
        for n in COUNTS
        if n <= cell.count
    ]
    assert fits == [False] * (len(fits) - 1) + [True]


@pytest.mark.parametrize("name", [name for name, preset in WAYS.items() if preset.command == "train"])
def test_a_way_is_a_plan_that_is_allowed(name):
    assert train(load("meta-llama-3.1-8b"), TrainingPlan(**WAYS[name].values), None).peak_bytes


def test_every_curve_passes_where_the_scenario_stands():
    plan = TrainingPlan(seq=5000, micro_batch=3, dp=6, zero=3, method="lora")
    for changes in AGAINST.values():
        values = changes(plan)
        field = next(iter(values[0]))
        assert getattr(plan, field) in [each[field] for each in values]
