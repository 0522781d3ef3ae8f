"""Totals and active parameters against what Hub pages, papers and model cards state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calc.catalogue import load
from calc.parameters import parameters

TOTALS = json.loads(Path(__file__).with_name("parameter_counts.json").read_text())

# model, billions of active parameters as its card or paper states them, and whether that leaves out the input embedding
ACTIVE = [
    ("mixtral-8x7b-v0.1", "12.9", False),  # arXiv 2401.04088, section 1: "13B active"; its authors' release: 12.9B
    ("deepseek-v3", "37", True),  # arXiv 2412.19437, abstract: 37B activated for each token
    ("qwen3-30b-a3b", "3.3", False),  # model card: 3.3B activated
    ("qwen3-235b-a22b", "22", False),  # model card: 22B activated
    ("gpt-oss-120b", "5.1", True),  # model card, arXiv 2508.10925, table 1: 5.13B active, without the embedding
    ("gpt-oss-20b", "3.6", True),  # the same: 3.61B
    ("qwen3-coder-480b-a35b-instruct", "35", False),  # model card: 35B activated
    ("kimi-k2-instruct", "32", True),  # arXiv 2507.20534, section 2.3: 32.6B activated; the card says 32B
]


@pytest.mark.parametrize("row", TOTALS, ids=lambda row: f"{row['model']}{'-untied' * row['untied_head']}")
def test_a_published_total_is_ours(row):
    answer = parameters(load(row["model"]))
    head = answer.spec.vocab_size * answer.spec.hidden_size if row["untied_head"] else 0
    assert answer.total + head == row["total"]


@pytest.mark.parametrize(("model", "stated", "without_embedding"), ACTIVE)
def test_active_parameters_are_the_published_ones(model, stated, without_embedding):
    answer = parameters(load(model))
    active = answer.active_without_embedding if without_embedding else answer.active
    step = 10 ** (9 - len(stated.partition(".")[2]))  # cards round (12.88 is 12.9) or cut off (3.353 is 3.3)
    assert round(float(stated) * 1e9) in (active // step * step, round(active / step) * step)


def test_deepseek_v3_counts_37_billion_by_both_conventions():
    answer = parameters(load("deepseek-v3"))
    assert (answer.active, answer.active_without_embedding) == (37_552_282_624, 36_625_603_584)
