"""vLLM's own planner, asked for the pool of each model and plan: blocks, tokens and requests at once, exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calc.catalogue import load
from calc.serving import ServingPlan
from calc.serving.answer import capacity_of

ROWS = json.loads((Path(__file__).parent / "vllm_pools.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("model", sorted({row["model"] for row in ROWS}))
def test_the_pool_is_that_of_vllms_planner(model):
    spec = load(model)
    for row in (row for row in ROWS if row["model"] == model):
        plan = ServingPlan(engine="vllm", kv_memory_gib=row["gib"], async_scheduling=False, **row["plan"])
        room = capacity_of(spec, plan)
        assert (room.blocks, room.tokens) == (row["blocks"], row["tokens"]), row
        assert room.concurrency == row["concurrency"], row


def test_the_record_has_hybrids_and_a_hundred_cases():
    assert len(ROWS) >= 100
    assert any(row["groups"] > 1 for row in ROWS)
