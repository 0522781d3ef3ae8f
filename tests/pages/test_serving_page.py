"""What the page of the KV cache says of an answer: whole sequences, blocks that agree with the tokens, what is short."""

from __future__ import annotations

from typing import Any

import pytest

from calc.catalogue import load
from calc.hardware import gpu
from calc.serving import ServingAnswer, ServingPlan, serve
from pages.kv_cache import headline
from pages.ui.views import Metric, Numbers

NUMBERS = Numbers("GiB")


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
    assert paged.help == "Sequences of 4,096 tokens; each takes 513 of the pool's 82,869 blocks"
    assert "no blocks" in cards(served(engine="llama.cpp"))["Tokens that fit"].help
