"""What the page of the KV cache says of an answer: whole sequences, blocks that agree with the tokens, what is short."""

from __future__ import annotations

from typing import Any

import pytest

from calc.catalogue import load
from calc.hardware import custom_gpu, gpu
from calc.serving import ServingAnswer, ServingPlan, serve
from calc.units import ceil_div
from pages.kv_cache import headline, verdict
from pages.ui.views import Metric, Numbers

NUMBERS = Numbers("GiB")
SPEED = ("First token (TTFT)", "Next token (TPOT)", "Tokens a second")


def served(model: str = "llama-2-7b", on: str = "h100-sxm-80gb", **plan: Any) -> ServingAnswer:
    return serve(load(model), ServingPlan(**plan), gpu(on))


def cards(answer: ServingAnswer) -> dict[str, Metric]:
    return {card.label: card for card in headline(answer, NUMBERS)}


@pytest.mark.parametrize(("on", "whole"), [("h100-sxm-80gb", 29), ("rtx-4090-24gb", 4)])
def test_sequences_that_fit_are_whole_and_one_more_does_not_fit(on: str, whole: int):
    card = cards(served(on=on))["Sequences that fit"]
    assert card.value == str(whole)
    assert served(on=on, concurrency=whole).capacity.fits
    assert not served(on=on, concurrency=whole + 1).capacity.fits


def test_blocks_of_16_tokens_agree_with_the_tokens_beside_them():
    room = served().capacity
    card = cards(served())["Tokens that fit"]
    assert card.value == f"{room.tokens:,}" == "122,878"
    assert card.help.endswith("Its 7,679 whole blocks of 16 tokens hold 122,864")
    paged = cards(served("gpt-oss-20b", engine="vllm"))["Tokens that fit"]
    assert paged.help == "Sequences of 4,096 tokens; each takes 513 of the pool's 78,955 blocks"
    assert "no blocks" in cards(served(engine="llama.cpp"))["Tokens that fit"].help


def test_the_verdict_says_the_need_and_what_is_left():
    answer = served()
    assert verdict(answer, NUMBERS).fits
    assert answer.capacity.needed == answer.breakdown.total
    assert verdict(answer, NUMBERS).why.startswith(
        "needs 14.78 GiB of 72.78 GiB per GPU (92.0% of its memory); headroom 58.00 GiB; room for 60.00 GiB of cache"
    )


@pytest.mark.parametrize("engine", ["logical", "vllm", "llama.cpp"])
def test_the_verdict_says_what_is_short_as_many_sequences_fewer_would_save(engine: str):
    answer = served(engine=engine, concurrency=40)
    assert answer.capacity.headroom is not None
    short = -answer.capacity.headroom
    assert f"; short by {NUMBERS.show(short)};" in verdict(answer, NUMBERS).why
    enough = 40 - ceil_div(short, answer.kv_bytes_per_sequence)
    assert served(engine=engine, concurrency=enough).capacity.fits
    assert not served(engine=engine, concurrency=enough + 1).capacity.fits


def test_weights_that_are_more_than_the_gpu_has_are_said_first():
    found = verdict(served("llama-2-70b", concurrency=2), NUMBERS)
    assert not found.fits
    assert found.why.startswith("the weights alone take 128.48 GiB of 79.11 GiB; needs ")


def test_room_that_the_plan_states_is_for_the_cache_alone():
    found = verdict(served(kv_memory_gib=10, concurrency=6), NUMBERS)
    assert not found.fits
    assert found.why.startswith("the cache needs 12.00 GiB of 10.00 GiB given to it; short by 2.00 GiB")


def test_speed_is_shown_in_its_unit_and_unknown_where_the_gpu_gives_none():
    known = cards(served(concurrency=30))
    assert [known[label].value for label in SPEED] == ["58.09 ms", "23.18 ms", "1,294 tok/s"]
    assert "bound by memory" in known["Next token (TPOT)"].help
    bare = serve(load("llama-2-7b"), ServingPlan(), custom_gpu(memory_gib=80))
    assert [cards(bare)[label].value for label in SPEED] == ["unknown"] * 3
