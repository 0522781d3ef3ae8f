"""What training runs were measured to hold, row by row against the prediction: the same counter, and every error on record."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from calc.training.overhead import FRAGMENTATION
from tests.published.training_memory import (
    HELD_OUT,
    PREDICTED,
    ROWS,
    UNITS,
    error_percent,
    errors_of,
    ninetieth,
    predicted,
)


def named(rows: list[dict[str, Any]]) -> list:
    return [pytest.param(row, id=row["id"]) for row in rows]


@pytest.mark.parametrize("row", named(PREDICTED + HELD_OUT))
def test_the_prediction_is_the_one_on_record(row):
    found = predicted(row)
    assert (found, error_percent(row, found)) == (row["predicted"], row["error_percent"])


@pytest.mark.parametrize("row", named([row for row in ROWS if "limit" in row]))
def test_a_run_that_ran_out_of_memory_is_predicted_to_need_more_than_there_was(row):
    found = predicted(row)
    assert found == row["predicted"]
    assert found > row["limit"] * UNITS[row["unit"]]


def test_every_row_says_what_it_measured_and_where_it_stands():
    assert len(ROWS) - len(HELD_OUT) == 215
    assert len(ROWS) == len({row["id"] for row in ROWS})
    for row in ROWS:
        assert row["source"].startswith("https://"), row["id"]
        assert ("predicted" in row) != ("not_predicted" in row), row["id"]
        assert row["measured"] is None or row["measured"] > 0, row["id"]


def test_runs_that_were_held_out_are_predicted_as_well():
    assert len(HELD_OUT) == 6
    assert max(abs(row["error_percent"]) for row in HELD_OUT) < 1.5


def test_a_miss_has_its_cause_next_to_it():
    assert [row["id"] for row in PREDICTED if abs(row["error_percent"]) > 10 and not row["why"]] == []


def test_the_assumed_fragmentation_is_what_megatron_runs_showed():
    shares = sorted(100 * (row["reserved_mib"] / row["allocated_mib"] - 1) for row in ROWS if "reserved_mib" in row)
    assert (len(shares), round(shares[0], 1), round(median(shares), 1), round(shares[-1], 1)) == (11, 2.8, 4.7, 9.3)
    assert round(median(shares)) == FRAGMENTATION


def test_nine_of_ten_rows_of_high_confidence_are_predicted_half_of_them_within_four_percent():
    rows = [row for row in ROWS if row["confidence"] == "high" and row["measured"]]
    errors = errors_of(rows)
    assert len(errors) >= 0.9 * len(rows)
    assert median(errors) <= 4
    assert ninetieth(errors) <= 15


def test_what_the_allocator_is_modelled_to_reserve_is_what_runs_of_torchtitan_reserved():
    """With expandable segments, and with the old root group until July 2025 (pull request 1094)."""
    rows = [row for row in PREDICTED if (row["program"], row["counter"]) == ("torchtitan", "peak_reserved")]
    rows = [row for row in rows if row["confidence"] == "high"]
    errors = errors_of(rows)
    assert len(errors) >= 20
    assert median(errors) < 2
    assert sum(error < 6.5 for error in errors) >= 16
