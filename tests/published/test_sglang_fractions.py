"""SGLang's own rule for mem_fraction_static, run for cards, layouts and chunks: the fraction and the defaults, exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from calc.catalogue import load
from calc.hardware import gpu
from calc.serving import ServingPlan
from calc.serving.sglang import defaults, mem_fraction_static
from calc.units import MiB

RECORD = json.loads((Path(__file__).parent / "sglang_fractions.json").read_text(encoding="utf-8"))
ROWS = [dict(zip(RECORD["columns"], row, strict=True)) for row in RECORD["rows"]]


@pytest.mark.parametrize("latent", [False, True])
def test_the_fraction_is_that_of_sglangs_rule(latent):
    spec = load("deepseek-v2-lite" if latent else "meta-llama-3.1-8b")
    for row in (row for row in ROWS if row["mla"] is latent):
        card = replace(gpu("h100-sxm-80gb"), memory_bytes=row["memory_mib"] * MiB)
        plan = ServingPlan(engine="sglang", tp=row["tp"], pp=row["pp"], dp=row["dp"], max_batched_tokens=row["chunk"])
        assert mem_fraction_static(spec, plan, card) == row["fraction"], row
        assert defaults(plan, card) == (row["chunked_prefill_size"], row["max_bs"]), row


def test_the_record_has_over_a_hundred_cases():
    assert len(ROWS) >= 100
