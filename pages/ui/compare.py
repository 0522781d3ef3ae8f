"""The pinned scenarios and what is on screen in one table and one chart: what differs, the figures, the difference to the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from calc.errors import InputError
from pages.ui import charts, link, pins, scenario, widgets
from pages.ui.numbers import Figure, Numbers
from pages.ui.parts import Parts
from pages.ui.scenario import Scenario

if TYPE_CHECKING:
    from pages.ui.page import Question


def show(question: Question, numbers: Numbers) -> None:
    """The table and the chart; a scenario without an answer says why in its column."""
    scenarios = {"on screen": scenario.current()} | {f"pin {at}": pin for at, pin in enumerate(pins.kept(), 1)}
    st.header("Compared with the pins", anchor=False)
    answers = {name: _answer(question, each) for name, each in scenarios.items()}
    _table(question, numbers, scenarios, answers)
    bars: dict[str, Parts] = {
        name: question.bar(answer) for name, answer in answers.items() if question.bar and not isinstance(answer, str)
    }
    if bars:
        charts.stacked(
            bars, "bytes" if question.command in ("train", "serve") else "parameters", numbers, "compared", _said(bars)
        )
    with st.container(horizontal=True, gap="small"):
        for at, pin in enumerate(pins.kept()):
            st.button(f"Show pin {at + 1}", key=f"show pin {at}", on_click=widgets.take, args=(pin,))
            st.button(f"Remove pin {at + 1}", key=f"remove pin {at}", on_click=_remove, args=(at,), type="tertiary")


def _remove(at: int) -> None:
    link.touched()
    pins.remove(at)


def _answer(question: Question, asked: Scenario) -> Any:
    """The answer, or the complaint as text."""
    try:
        return question.ask(asked)[0]
    except InputError as error:
        return str(error)


def _table(question: Question, numbers: Numbers, scenarios: dict[str, Scenario], answers: dict[str, Any]) -> None:
    rows: dict[str, list[str]] = {}
    rows |= pins.differing(list(scenarios.values()), [question.plan])
    found = {
        name: question.figures(answer, numbers, scenarios[name])
        for name, answer in answers.items()
        if not isinstance(answer, str)
    }
    first = next(iter(found.values()), [])
    for place, figure in enumerate(first):
        rows[figure.label] = [
            _figure(found[name][place], figure, numbers) if name in found else str(answers[name]) for name in scenarios
        ]
    table = {"": list(rows)} | {name: [texts[at] for texts in rows.values()] for at, name in enumerate(scenarios)}
    st.dataframe(table, hide_index=True, alt="What differs between the scenarios, and their figures")


def _figure(figure: Figure, first: Figure, numbers: Numbers) -> str:
    """A figure, with its difference to the first scenario's."""
    if figure is first or not figure.amount or not first.amount or figure.amount == first.amount:
        return figure.value
    return f"{figure.value} ({figure.amount / first.amount - 1:+.1%})"


def _said(bars: dict[str, Parts]) -> str:
    return "Stacked bars of " + ", ".join(bars) + " on one axis"
