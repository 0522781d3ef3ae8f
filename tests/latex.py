"""An evaluator of the small LaTeX that formulas are written in, so that tests can hold a formula against its value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from calc.breakdown import Breakdown, Formula

_TOKEN = re.compile(r"\s*(<[^<>]+>|\\[a-zA-Z]+|\d+(?:\.\d+)?|[-+^{}(),/])")
_BRACKETS = {"(": ")", "{": "}", r"\lceil": r"\rceil", r"\lfloor": r"\rfloor"}


def evaluate(formula: Formula, numbers: Mapping[str, float]) -> Fraction:
    """The value of the formula with these numbers, exactly. ValueError on LaTeX outside the agreed set."""
    parser = _Parser(formula.latex, numbers)
    value = parser.sum()
    if parser.tokens:
        raise ValueError(f"left over in {formula.latex!r}: {parser.tokens}")
    return value


def assert_formulas_hold(breakdown: Breakdown) -> None:
    """Every leaf has a formula, and its formula with its numbers is its value."""
    for row in breakdown.rows():
        leaf = row.component
        assert leaf.formula is not None, row.path
        assert leaf.formula.source, row.path
        expected = evaluate(leaf.formula, leaf.numbers)
        if isinstance(leaf.value, int):
            assert leaf.value == expected, (row.path, leaf.value, expected, leaf.formula.with_numbers(leaf.numbers))
        else:
            assert math.isclose(leaf.value, expected, rel_tol=1e-12), (row.path, leaf.value, float(expected))


class _Parser:
    def __init__(self, latex: str, numbers: Mapping[str, float]) -> None:
        latex = latex.replace(r"\left", "").replace(r"\right", "").replace(r"\,", " ")
        self.tokens = _TOKEN.findall(latex)
        if _TOKEN.sub("", latex).strip():
            raise ValueError(f"cannot read {latex!r}: {_TOKEN.sub('', latex).strip()!r}")
        self.numbers = numbers

    def peek(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self, wanted: str = "") -> str:
        if not self.tokens or (wanted and self.tokens[0] != wanted):
            raise ValueError(f"expected {wanted or 'more'} before {self.tokens}")
        return self.tokens.pop(0)

    def sum(self) -> Fraction:
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> Fraction:
        value = self.power()
        while self.peek() in (r"\cdot", r"\times", "/"):
            value = value / self.power() if self.take() == "/" else value * self.power()
        return value

    def power(self) -> Fraction:
        value = self.atom()
        if self.peek() == "^":
            self.take()
            value = Fraction(value ** self.bracket("{"))
        return value

    def bracket(self, opening: str) -> Fraction:
        self.take(opening)
        value = self.sum()
        self.take(_BRACKETS[opening])
        return value

    def pair(self) -> tuple[Fraction, Fraction]:
        self.take("(")
        left = self.sum()
        self.take(",")
        right = self.sum()
        self.take(")")
        return left, right

    def atom(self) -> Fraction:
        token = self.peek()
        if token == "-":
            self.take()
            return -self.power()
        if token in ("(", "{"):
            return self.bracket(token)
        if token == r"\lceil":
            return Fraction(math.ceil(self.bracket(token)))
        if token == r"\lfloor":
            return Fraction(math.floor(self.bracket(token)))
        self.take()
        if token == r"\frac":
            return self.bracket("{") / self.bracket("{")
        if token in (r"\max", r"\min"):
            return (max if token == r"\max" else min)(self.pair())
        if token.startswith("<"):
            return Fraction(self.numbers[token[1:-1]])
        return Fraction(token)
