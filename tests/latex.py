"""An evaluator of the small LaTeX that formulas are written in, so that tests can hold a formula against its value."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache

from calc.breakdown import Breakdown, Formula

_TOKEN = re.compile(r"\s*(<[^<>]+>|\\[a-zA-Z]+|\d+(?:\.\d+)?|[-+^{}(),/])")
_BRACKETS = {"(": ")", "{": "}", r"\lceil": r"\rceil", r"\lfloor": r"\rfloor"}
# A part of a formula as a function of its numbers. Whole numbers stay `int` until something is divided: it is as exact, and faster.
_Value = int | Fraction
_Part = Callable[[Mapping[str, float]], _Value]


def evaluate(formula: Formula, numbers: Mapping[str, float]) -> Fraction:
    """The value of the formula with these numbers, exactly. ValueError on LaTeX outside the agreed set."""
    return Fraction(_parsed(formula.latex)(numbers))


def assert_formulas_hold(breakdown: Breakdown) -> None:
    """Every leaf has a formula, and its formula with its numbers is its value."""
    for row in breakdown.rows():
        leaf = row.component
        assert leaf.formula is not None, row.path
        assert leaf.formula.source, row.path
        expected = _parsed(leaf.formula.latex)(leaf.numbers)
        if isinstance(leaf.value, int):
            assert leaf.value == expected, (row.path, leaf.value, expected, leaf.formula.with_numbers(leaf.numbers))
        else:
            assert math.isclose(leaf.value, expected, rel_tol=1e-12), (row.path, leaf.value, float(expected))


@cache
def _parsed(latex: str) -> _Part:
    parser = _Parser(latex)
    part = parser.sum()
    if parser.tokens:
        raise ValueError(f"left over in {latex!r}: {parser.tokens}")
    return part


def _divided(left: _Value, right: _Value) -> _Value:
    return Fraction(left) / right


def _exact(number: float) -> _Value:
    return number if isinstance(number, int) else Fraction(number)


class _Parser:
    def __init__(self, latex: str) -> None:
        latex = latex.replace(r"\left", "").replace(r"\right", "").replace(r"\,", " ")
        self.tokens = _TOKEN.findall(latex)
        if _TOKEN.sub("", latex).strip():
            raise ValueError(f"cannot read {latex!r}: {_TOKEN.sub('', latex).strip()!r}")

    def peek(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self, wanted: str = "") -> str:
        if not self.tokens or (wanted and self.tokens[0] != wanted):
            raise ValueError(f"expected {wanted or 'more'} before {self.tokens}")
        return self.tokens.pop(0)

    def sum(self) -> _Part:
        return self._chain(self.product, {"+": operator.add, "-": operator.sub})

    def product(self) -> _Part:
        return self._chain(self.power, {r"\cdot": operator.mul, r"\times": operator.mul, "/": _divided})

    def _chain(self, operand: Callable[[], _Part], signs: Mapping[str, Callable[[_Value, _Value], _Value]]) -> _Part:
        value = operand()
        while self.peek() in signs:
            value = _joined(signs[self.take()], value, operand())
        return value

    def power(self) -> _Part:
        base = self.atom()
        if self.peek() == "^":
            self.take()
            exponent = self.bracket("{")
            return lambda numbers: Fraction(Fraction(base(numbers)) ** exponent(numbers))
        return base

    def bracket(self, opening: str) -> _Part:
        self.take(opening)
        value = self.sum()
        self.take(_BRACKETS[opening])
        return value

    def pair(self) -> tuple[_Part, _Part]:
        self.take("(")
        left = self.sum()
        self.take(",")
        right = self.sum()
        self.take(")")
        return left, right

    def atom(self) -> _Part:
        token = self.peek()
        if token in ("(", "{"):
            return self.bracket(token)
        if token in (r"\lceil", r"\lfloor"):
            rounded, inside = (math.ceil if token == r"\lceil" else math.floor), self.bracket(token)
            return lambda numbers: rounded(inside(numbers))
        self.take()
        if token == "-":
            negated = self.power()
            return lambda numbers: -negated(numbers)
        if token == r"\frac":
            return _joined(_divided, self.bracket("{"), self.bracket("{"))
        if token in (r"\max", r"\min"):
            return _joined(max if token == r"\max" else min, *self.pair())
        if token.startswith("<"):
            name = token[1:-1]
            return lambda numbers: _exact(numbers[name])
        constant = int(token) if token.isdigit() else Fraction(token)
        return lambda numbers: constant


def _joined(operation: Callable[[_Value, _Value], _Value], left: _Part, right: _Part) -> _Part:
    return lambda numbers: operation(left(numbers), right(numbers))
