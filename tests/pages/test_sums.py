"""What the pages show, without a browser: parts sum to the total, each part has its colour, no 0 stands for something else."""

from __future__ import annotations

import math
import re
from itertools import cycle, islice, product

import pytest

from calc.commands import COMMANDS
from calc.errors import InputError
from pages import compute, kv_cache, parameters, pipeline, training
from pages.ui import parts
from pages.ui.fields import fields_of
from pages.ui.measuring.runs import MeasurePlan
from pages.ui.scenario import SHARED, Scenario

_MODELS = (
    "llama-3.2-1b",
    "qwen3-30b-a3b",
    "deepseek-v3",
    "gpt-oss-20b",
    "gemma-3-4b-it",
    "mamba2-130m",
    "qwen2.5-vl-7b",
)
_GPUS = ("rtx-4090-24gb", "h100-sxm-80gb", "mi300x-192gb")
_SETTINGS = (
    {},
    {"recompute": "none", "recipe": "pure-bf16"},
    {"method": "qlora", "recipe": "pure-bf16", "lora_targets": ("all-linear",)},
    {"gpus": 16, "seq": 8192, "context": 32768},
    {"optimizer_kernel": "foreach", "micro_batch": 2, "engine": "vllm", "concurrency": 8},
)
SCENARIOS = [
    Scenario({"model": model, "gpu": gpu, **settings})
    for (model, gpu), settings in islice(zip(cycle(product(_MODELS, _GPUS)), cycle(_SETTINGS), strict=False), 50)
]


def answers(question):
    """The answers of a page to the scenarios; those that are refused are left out, but not all."""
    found = []
    for asked in SCENARIOS:
        try:
            found.append(question.ask(asked)[0])
        except InputError:
            continue
    assert len(found) >= 30
    return found


def test_the_bar_of_training_sums_to_the_memory_that_the_page_states():
    for answer in answers(training.QUESTION):
        assert sum(value for _, value in parts.of_worst_stage(answer)) == answer.driver_bytes
        shown = parts.of_training(answer).values()
        assert max(sum(value for _, value in row) for row in shown) == answer.driver_bytes


def test_the_bar_of_serving_sums_to_what_is_needed():
    for answer in answers(kv_cache.QUESTION):
        total = sum(value for _, value in parts.of_serving(answer))
        assert total == (answer.capacity.needed if answer.capacity.needed is not None else answer.breakdown.total)


def test_parameters_and_flops_by_part_sum_to_the_whole():
    for answer in answers(parameters.QUESTION):
        assert sum(value for _, value in parts.by_role(answer.breakdown)) == answer.total
        assert sum(value for _, value in parts.by_role(answer.active_breakdown)) == answer.active
    for answer in answers(compute.QUESTION):
        for counted in (answer.causal, answer.full):
            assert sum(value for _, value in parts.by_role(counted.breakdown)) == counted.breakdown.total


def test_the_seconds_of_a_step_by_pass_sum_to_the_step():
    timed = 0
    for asked in SCENARIOS:
        try:
            found = COMMANDS["time"].answer(asked.of(COMMANDS["time"].plan), asked.spec(), asked.gpu())
        except InputError:
            continue
        timed += 1
        assert math.isclose(sum(value for _, value in parts.of_time(found.breakdown)), found.step_seconds, rel_tol=1e-9)
    assert timed >= 10


def test_every_part_on_screen_has_its_own_name_and_colour():
    shown = set()
    for answer in answers(training.QUESTION):
        shown |= {name for row in parts.of_training(answer).values() for name, _ in row}
        shown |= {parts.name_of(name) for _, found in answer.timeline() for name in found}
    for answer in answers(kv_cache.QUESTION):
        shown |= {name for name, _ in parts.of_serving(answer)}
    assert shown <= set(parts.COLOURS)


_MEANT = re.compile(r"\\b0 ?(:|means|is) (?!0)|\\b0:|; 0 ", re.ASCII)
_NUMBERS_OF_THEIR_OWN = {"length_spread"}  # 0: all lengths are equal, which is what a spread of 0 is


@pytest.mark.parametrize("question", [training, kv_cache, compute, pipeline, parameters], ids=lambda page: page.TITLE)
def test_no_zero_stands_for_something_else_on_a_page(question):
    for name, field in fields_of(question.QUESTION.plan).items():
        said = field.info.description or ""
        assert name in _NUMBERS_OF_THEIR_OWN or not _MEANT.search(said), f"{name}: {said}"


def test_no_zero_stands_for_something_else_in_the_other_forms():
    for plan in (*SHARED, MeasurePlan):
        for name, field in fields_of(plan).items():
            assert not _MEANT.search(field.info.description or ""), name
