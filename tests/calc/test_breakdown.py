"""The breakdown: totals are derived, paths are stable, two of them can be laid side by side."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calc.breakdown import Breakdown, Component, Formula, Pair, compare, to_csv
from tests.latex import evaluate

TREE = Component(
    "parameters",
    children=(
        Component("embedding", 100),
        Component("layers", count=3, children=(Component("query", 7), Component("experts", 5, count=4))),
    ),
)


def test_a_total_counts_every_copy():
    assert TREE.total == 100 + 3 * (7 + 5 * 4)


def test_rows_have_stable_paths_and_sum_to_the_total():
    rows = Breakdown(TREE, "parameters").rows()
    assert [(row.path, row.value, row.copies) for row in rows] == [
        ("parameters/embedding", 100, 1),
        ("parameters/layers/query", 21, 3),
        ("parameters/layers/experts", 60, 12),
    ]


def test_a_root_without_a_name_adds_nothing_to_the_paths():
    tree = Component("", children=(Component("a", children=(Component("b", 1),)),))
    assert [row.path for row in Breakdown(tree, "bytes").rows()] == ["a/b"]


leaves = st.builds(Component, st.text("abc", min_size=1, max_size=2), st.integers(0, 2**70), count=st.integers(1, 5))
trees = st.recursive(
    leaves,
    lambda children: st.builds(
        Component,
        st.text("abc", min_size=1, max_size=2),
        children=st.lists(children, min_size=1, max_size=4).map(tuple),
        count=st.integers(1, 5),
    ),
    max_leaves=12,
)


@given(trees)
def test_leaves_sum_to_the_root_exactly(tree):
    breakdown = Breakdown(tree, "bytes")
    assert sum(row.value for row in breakdown.rows()) == breakdown.total


@given(trees)
def test_csv_and_json_carry_the_same_exact_integers(tree):
    breakdown = Breakdown(tree, "bytes")
    read = [(row["path"], int(row["value"])) for row in csv.DictReader(io.StringIO(breakdown.csv()))]
    assert read == [(part["path"], part["value"]) for part in breakdown.components()]


def test_a_formula_shows_letters_or_numbers():
    formula = Formula(r"<s> \cdot <b> \cdot (16 \cdot <h> + <n_{kv}>^{2})", "a paper")
    numbers = {"s": 4096, "b": 1, "h": 2, "n_{kv}": 3}
    assert formula.symbolic() == r"s \cdot b \cdot (16 \cdot h + n_{kv}^{2})"
    assert formula.with_numbers(numbers) == r"4{,}096 \cdot 1 \cdot (16 \cdot 2 + 3^{2})"
    assert evaluate(formula, numbers) == 4096 * (32 + 9)


@pytest.mark.parametrize(
    ("latex", "value"),
    [
        (r"\lceil \frac{7}{2} \rceil", 4),
        (r"\lfloor \frac{7}{2} \rfloor", 3),
        (r"\max(2, 3) - \min(2, 3)", 1),
        (r"2 - 3 - 4", -5),
        (r"12 / 3 / 2", 2),
        (r"2 \cdot 3^{2}", 18),
        (r"-2 + 5", 3),
    ],
)
def test_the_evaluator_reads_the_agreed_latex(latex, value):
    assert evaluate(Formula(latex, "test"), {}) == value


@pytest.mark.parametrize("latex", [r"\sum 3", "2 3", "(2", r"\frac{1}"])
def test_the_evaluator_refuses_other_latex(latex):
    with pytest.raises(ValueError, match=r"."):
        evaluate(Formula(latex, "test"), {})


def test_compare_keeps_what_only_one_side_has():
    predicted = Breakdown(Component("", children=(Component("a", 100), Component("only_predicted", 5))), "bytes")
    observed = Breakdown(Component("", children=(Component("a", 110), Component("unattributed", 7))), "bytes")
    assert compare(predicted, observed) == [
        Pair("a", 100, 110, 10 / 110),
        Pair("only_predicted", 5, None, None),
        Pair("unattributed", None, 7, None),
        Pair("total", 105, 117, 12 / 117),
    ]


def test_compare_sums_finer_leaves_into_the_coarser_one():
    fine = Component("a", children=(Component("x", 1), Component("y", 2)))
    predicted = Breakdown(Component("", children=(fine,)), "bytes")
    observed = Breakdown(Component("", children=(Component("a", 4),)), "bytes")
    assert compare(predicted, observed) == [Pair("a", 3, 4, 0.25), Pair("total", 3, 4, 0.25)]


def test_compare_refuses_two_units():
    leaf = Component("a", 1)
    with pytest.raises(ValueError, match="bytes with parameters"):
        compare(Breakdown(leaf, "bytes"), Breakdown(leaf, "parameters"))


def test_csv_keeps_spreadsheets_from_running_a_cell():
    assert to_csv([{"name": "=1+1", "value": -3}], ("name", "value")) == "name,value\n'=1+1,-3\n"
