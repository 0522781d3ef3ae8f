"""Any figure of a page against any numeric field, one line for each value of a second field; its points as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import streamlit as st

from calc.errors import InputError
from pages.ui import charts
from pages.ui.charts import Curve
from pages.ui.fields import Field, fields_of
from pages.ui.numbers import Figure, Numbers
from pages.ui.scenario import SPREAD, Scenario, Spread

if TYPE_CHECKING:
    from pages.ui.page import Question

_LINES: Final = 4  # values of the second field
_DOUBLINGS: Final = tuple(1 << place for place in range(11))
_SHARES: Final = tuple(tenth / 10 for tenth in range(1, 10))
_FACTORS: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def fields(question: Question, asked: Scenario) -> dict[str, Field]:
    """The numeric fields that the question's answer hangs on, by label; the page's sliders first."""
    auto = question.spread and asked.layout == "auto"
    found = [fields_of(Spread)["gpus"]] if auto else []
    own = fields_of(question.plan)
    found += [own[name] for name in dict.fromkeys((*question.sliders, *own)) if not (auto and name in SPREAD)]
    return {each.appearance.label: each for each in found if each.is_number and not each.is_switch}


def values_of(field: Field, asked: Scenario) -> list[float]:
    """The values that a sweep tries, ascending: the slider's stops, doublings or shares, and what the scenario has."""
    now = asked.value(field)
    tried: Sequence[float] = field.appearance.stops
    if not tried and int in field.kinds:
        tried = _DOUBLINGS
    elif not tried:
        tried = (
            [now * factor for factor in _FACTORS] if isinstance(now, int | float) and now else [*_SHARES, *_DOUBLINGS]
        )
    wanted = {*tried, *([now] if isinstance(now, int | float) else [])}
    return sorted(value for value in wanted if _takes(field, value))


def _takes(field: Field, value: float) -> bool:
    try:
        field.checked(value)
    except InputError:
        return False
    return True


def line(
    question: Question, asked: Scenario, field: Field, label: str, numbers: Numbers
) -> list[tuple[float, float | None]]:
    """The figure of that label at each value of the field; None where the scenario has no answer."""
    points = []
    for value in values_of(field, asked):
        found = _figures(question, asked.changed({field.key: value}), numbers)
        points.append((float(value), next((each.amount for each in found if each.label == label), None)))
    return points


def _figures(question: Question, asked: Scenario, numbers: Numbers) -> list[Figure]:
    try:
        return question.figures(question.ask(asked)[0], numbers, asked)
    except InputError:
        return []


def show(question: Question, answer: Any, numbers: Numbers, asked: Scenario) -> None:
    """Choose a figure and one field or two, and see the curve."""
    known = {each.label: each for each in question.figures(answer, numbers, asked) if each.amount is not None}
    offered = fields(question, asked)
    if not known or not offered:
        st.info("This answer has no figure that a number moves.")
        return
    key = f"sweep of {question.command}"
    with st.container(horizontal=True, gap="small"):
        label = st.selectbox("Figure", list(known), key=f"{key}, figure", width=250)
        name = st.selectbox("against", list(offered), key=f"{key}, field", width=250)
        others = [each for each in offered if each != name]
        second = st.selectbox("a line for each", ["nothing else", *others], key=f"{key}, second", width=250)
    field = offered[name]
    lines = [
        Curve(text, line(question, each, field, label, numbers))
        for text, each in _scenarios(offered.get(second), asked, label)
    ]
    xs = [at for at, _ in lines[0].points]
    ys = [value for each in lines for _, value in each.points if value is not None]
    now = asked.value(field)
    charts.curves(
        lines,
        name,
        known[label].unit,
        numbers,
        key,
        f"{label} against {name}",
        now=float(now) if isinstance(now, int | float) else None,
        log=xs[0] > 0 and xs[-1] >= 8 * xs[0],
        steep=bool(ys) and max(ys) > 500 * min(ys) > 0,
    )
    missing = sum(value is None for each in lines for _, value in each.points)
    if missing:
        st.caption(f"{missing:,} points are left out: the other settings do not allow them.")


def _scenarios(second: Field | None, asked: Scenario, label: str) -> list[tuple[str, Scenario]]:
    """The scenario, or one for each of a few values of the second field around its own."""
    if second is None:
        return [(label, asked)]
    values, now = values_of(second, asked), asked.value(second)
    place = values.index(now) if now in values else 0
    first = max(0, min(place - 1, len(values) - _LINES))
    chosen = values[first : first + _LINES]
    return [(f"{second.appearance.label} {value:,.6g}", asked.changed({second.key: value})) for value in chosen]
