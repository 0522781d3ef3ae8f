"""The timeline of a pipeline: its axis ends where what is drawn ends."""

from __future__ import annotations

from typing import Any

import pytest
import streamlit as st

from calc.pipeline import PipelinePlan, simulate
from pages.ui import charts


@pytest.mark.parametrize(("stages", "microbatches", "all_drawn"), [(4, 8, True), (32, 256, False)])
def test_the_axis_ends_with_the_last_operation_that_is_drawn(
    stages: int, microbatches: int, all_drawn: bool, monkeypatch: pytest.MonkeyPatch
):
    shown: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
    said: list[str] = []
    monkeypatch.setattr(st, "vega_lite_chart", lambda data, spec, key, **_: shown.append((data, spec)))
    monkeypatch.setattr(st, "caption", said.append)
    answer = simulate(PipelinePlan(stages=stages, microbatches=microbatches))
    charts.timeline(answer.timeline, stages, answer.makespan, "timeline")
    [(data, spec)] = shown
    end = max(row["end"] for row in data)
    assert spec["encoding"]["x"]["scale"]["domain"] == [0, end]
    assert (end == answer.makespan) is (len(data) == len(answer.timeline)) is all_drawn
    if all_drawn:
        assert not said
    else:
        assert f"drawn, up to {end:,.6g} of {answer.makespan:,.6g} s; the rest is left out" in said[0]
