"""What the Serve page says of an answer: whole requests, what is short, speed in its unit, parts that sum."""

from __future__ import annotations

from typing import Any

import pytest

from calc.catalogue import load
from calc.hardware import custom_gpu, gpu
from calc.serving import ServingAnswer, ServingPlan, serve
from calc.units import ceil_div
from pages.ui import parts
from pages.ui.answers.serving import figures_of, verdict
from pages.ui.numbers import Figure, Numbers

NUMBERS = Numbers("GiB")


def served(model: str = "llama-2-7b", on: str = "h100-sxm-80gb", **plan: Any) -> ServingAnswer:
    return serve(load(model), ServingPlan(**plan), gpu(on))


def cards(answer: ServingAnswer) -> dict[str, Figure]:
    return {card.label: card for card in figures_of(answer, NUMBERS)}


@pytest.mark.parametrize(("on", "whole"), [("h100-sxm-80gb", 29), ("rtx-4090-24gb", 4)])
def test_requests_that_fit_are_whole_and_one_more_does_not_fit(on: str, whole: int):
    assert cards(served(on=on))["Requests that fit"].value == str(whole)
    assert served(on=on, concurrency=whole).capacity.fits
    assert not served(on=on, concurrency=whole + 1).capacity.fits


def test_the_verdict_says_the_need_and_what_is_left():
    answer = served()
    assert verdict(answer, NUMBERS).fits
    assert answer.capacity.needed == answer.breakdown.total
    why = verdict(answer, NUMBERS).why
    assert why.startswith("29 requests of 4,096 tokens fit at once; one alone gets ")
    assert why.endswith("; needs 14.78 GiB of 72.78 GiB per GPU (92.0% of its memory); headroom 58.00 GiB")


@pytest.mark.parametrize("engine", ["logical", "vllm", "llama.cpp"])
def test_the_verdict_says_what_is_short_as_many_requests_fewer_would_save(engine: str):
    answer = served(engine=engine, concurrency=40)
    assert answer.capacity.headroom is not None
    short = -answer.capacity.headroom
    why = verdict(answer, NUMBERS).why
    assert f"; short by {NUMBERS.show(short)};" in why
    assert "tokens/s" not in why
    enough = 40 - ceil_div(short, answer.kv_bytes_per_sequence)
    assert served(engine=engine, concurrency=enough).capacity.fits
    assert not served(engine=engine, concurrency=enough + 1).capacity.fits


def test_weights_that_are_more_than_the_gpu_has_are_said_first():
    found = verdict(served("llama-2-70b", concurrency=2), NUMBERS)
    assert not found.fits
    assert found.why.startswith("the weights alone take 128.48 GiB of 79.11 GiB; needs ")
    assert "tokens/s" not in found.why
    assert "fit at once" not in found.why


def test_room_that_the_plan_states_is_for_the_cache_alone():
    found = verdict(served(kv_memory_gib=10, concurrency=6), NUMBERS)
    assert not found.fits
    assert found.why.startswith("the cache needs 12.00 GiB of 10.00 GiB given to it; short by 2.00 GiB")


def test_speed_is_unknown_where_the_gpu_gives_none():
    bare = cards(serve(load("llama-2-7b"), ServingPlan(), custom_gpu(memory_gib=80)))
    assert [bare[label].value for label in ("Tokens/s a user", "Tokens/s in all")] == ["unknown"] * 2


@pytest.mark.parametrize("engine", ["logical", "vllm", "llama.cpp"])
@pytest.mark.parametrize("model", ["llama-2-7b", "gpt-oss-20b", "qwen3-30b-a3b"])
def test_parts_on_screen_sum_to_the_need(model: str, engine: str):
    answer = served(model, "h200-141gb", engine=engine, concurrency=4)
    assert sum(value for _, value in parts.of_serving(answer)) == answer.capacity.needed
