"""How every page of an answer is built: widgets, headline, charts, table, formulas, downloads, command and link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import streamlit as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from streamlit.navigation.page import Page

from calc.commands import COMMANDS, command_line
from calc.errors import InputError
from pages.ui import scenario, share, views
from pages.ui.fields import Groups, ask_all, ask_plan, fields_of, made, meaning
from pages.ui.scenario import Missing, Side, Subject, View
from pages.ui.text import plain
from pages.ui.views import Metric, Numbers, Verdict

_FIGURES = 4  # of each question on an overview


@dataclass(frozen=True, slots=True)
class Question:
    """A page that asks one command. `groups` orders the plan's fields: "" is open, the rest fold away.

    `headline` makes the figures on top of the answer; `charts` draws it, with a key that is unique on the page; `verdict`
    says whether it fits.
    """

    command: str
    intro: str
    groups: Groups
    headline: Callable[[Any, Numbers], list[Metric]]
    charts: Callable[[Any, Numbers, str], None]
    verdict: Callable[[Any, Numbers], Verdict] | None = None

    def ask(self, side: Side, plan: BaseModel) -> Any:
        """The answer for one scenario. InputError when plan, model and GPU do not go together."""
        command = COMMANDS[self.command]
        return command.answer(
            plan, side.spec() if command.takes_model else None, side.gpu() if command.takes_gpu else None
        )


@st.fragment
def show(question: Question) -> None:
    """Draw the page of a question, for one scenario or two."""
    st.markdown(question.intro)
    _side_by_side(lambda side: _answer(question, side))
    share.link(_asked(COMMANDS[question.command].plan.model_fields))


def _side_by_side(draw: Callable[[Side], None]) -> None:
    """Each scenario in its column (one above the other where the screen is narrow); bad input ends its own column only."""
    sides = scenario.sides()
    for side, column in zip(sides, st.columns(len(sides), gap="large"), strict=True):
        with column, complaints():
            draw(side)


def _asked(fields: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    """What the widgets of this page and of the sidebar ask, by key."""
    each = [(side.prefix, {**Subject.model_fields, **fields}) for side in scenario.sides()]
    return dict(View.model_fields) | {prefix + name: field for prefix, found in each for name, field in found.items()}


def _answer(question: Question, side: Side) -> None:
    """One scenario: what is asked and what comes of it."""
    command, numbers = COMMANDS[question.command], Numbers(scenario.view().units)
    if command.takes_model:
        st.markdown(f"##### {_title(side, command.takes_gpu)}")
    top = st.container()
    plan = ask_plan(command.plan, question.groups, side.prefix)
    answer = question.ask(side, plan)
    with top:
        _verdict(question, answer, numbers)
        views.headline(question.headline(answer, numbers))
    question.charts(answer, numbers, side.prefix)
    views.table(answer.breakdown, numbers)
    views.formulas(answer.breakdown, numbers, side.prefix)
    views.downloads(answer, command.name, side.prefix)
    st.caption("The same on the command line:")
    st.code(command_line(command, plan, side.model_argument(), side.gpu_flags()), language="bash", wrap_lines=True)
    views.remarks(answer)


def _verdict(question: Question, answer: Any, numbers: Numbers) -> None:
    if question.verdict:
        views.verdict(question.verdict(answer, numbers))


def _title(side: Side, with_gpu: bool) -> str:
    model, gpu = plain(side.subject.model), plain(side.subject.gpu)
    return f"{model} on {gpu}" if with_gpu else model


@st.fragment
def overview(intro: str, groups: Groups, pages: Sequence[ModuleType]) -> None:
    """The questions of several pages at a glance: the first figures of each, and a link that takes the scenario there."""
    st.markdown(intro)
    plans = [COMMANDS[page.QUESTION.command].plan for page in pages]
    fields = fields_of(plans)
    named = {name: fields[name] for names in groups.values() for name in names}
    _side_by_side(lambda side: _cards(side, pages, ask_all(plans, groups, side.prefix), named))
    share.link(_asked(named))


def _cards(side: Side, pages: Sequence[ModuleType], values: Mapping[str, Any], asked: Mapping[str, FieldInfo]) -> None:
    st.markdown(f"##### {_title(side, with_gpu=True)}")
    numbers = Numbers(scenario.view().units)
    for page in pages:
        question: Question = page.QUESTION
        plan = COMMANDS[question.command].plan
        carried = {
            name: field
            for name, field in plan.model_fields.items()
            if name in asked and meaning(field) == meaning(asked[name])
        }
        with st.container(border=True), complaints():
            st.page_link(page_of(page), label=f"**{page.TITLE}** →", query_params=share.changed(_asked(carried)))
            answer = question.ask(side, made(plan, values, asked))
            _verdict(question, answer, numbers)
            views.headline(question.headline(answer, numbers)[:_FIGURES], in_card=True)


def page_of(page: ModuleType, default: bool = False) -> Page:
    """The page at the URL of its file's name; the default one also answers at /."""
    name = page.__name__.rpartition(".")[2]
    return st.Page(page.render, title=page.TITLE, icon=page.ICON, url_path=name, default=default)


@contextmanager
def complaints() -> Iterator[None]:
    """Bad input ends this part of the page with one message; the rest, and every widget's value, stays."""
    try:
        yield
    except Missing as error:
        st.info(plain(str(error)))
    except InputError as error:
        st.error(plain(str(error)))
