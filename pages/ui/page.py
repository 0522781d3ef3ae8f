"""How every page of an answer is built: widgets, headline, charts, table, formulas, downloads, command and link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import streamlit as st
from pydantic import BaseModel

from calc.commands import COMMANDS, command_line
from calc.errors import InputError
from pages.ui import scenario, share, views
from pages.ui.fields import ask_plan
from pages.ui.scenario import Missing, Side
from pages.ui.text import plain
from pages.ui.views import Metric, Numbers


@dataclass(frozen=True, slots=True)
class Question:
    """A page that asks one command. `groups` orders the plan's fields: "" is open, the rest fold away.

    `headline` makes the figures on top of the answer; `charts` draws it, with a key that is unique on the page.
    """

    command: str
    intro: str
    groups: Mapping[str, Sequence[str]]
    headline: Callable[[Any, Numbers], list[Metric]]
    charts: Callable[[Any, Numbers, str], None]


@st.fragment
def show(question: Question) -> None:
    """Draw the page, once or for two scenarios side by side (one above the other where the screen is narrow)."""
    st.markdown(question.intro)
    sides = scenario.sides()
    held: list[tuple[str, BaseModel]] = [("", scenario.view())]
    for side, column in zip(sides, st.columns(len(sides), gap="large"), strict=True):
        with column, complaints():
            held += [(side.prefix, side.subject)]
            held += [(side.prefix, _answer(question, side))]
    with st.expander("This scenario as a link", icon=":material/link:"):
        share.link(held)


def _answer(question: Question, side: Side) -> BaseModel:
    """One scenario: what it asks and what comes of it. Returns the plan."""
    command, numbers = COMMANDS[question.command], Numbers(scenario.view().units)
    if command.takes_model:
        st.markdown(f"##### {_title(question, side)}")
    top = st.container()
    plan = ask_plan(command.plan, question.groups, side.prefix)
    answer: Any = command.answer(
        plan, side.spec() if command.takes_model else None, side.gpu() if command.takes_gpu else None
    )
    with top:
        views.headline(question.headline(answer, numbers))
    question.charts(answer, numbers, side.prefix)
    views.table(answer.breakdown, numbers)
    views.formulas(answer.breakdown, numbers, side.prefix)
    views.downloads(answer, command.name, side.prefix)
    st.caption("The same on the command line:")
    st.code(command_line(command, plan, side.model_argument(), side.gpu_flags()), language="bash", wrap_lines=True)
    views.remarks(answer)
    return plan


def _title(question: Question, side: Side) -> str:
    model, gpu = plain(side.subject.model), plain(side.subject.gpu)
    return f"{model} on {gpu}" if COMMANDS[question.command].takes_gpu else model


@contextmanager
def complaints() -> Iterator[None]:
    """Bad input ends this part of the page with one message; the rest, and every widget's value, stays."""
    try:
        yield
    except Missing as error:
        st.info(plain(str(error)))
    except InputError as error:
        st.error(plain(str(error)))
