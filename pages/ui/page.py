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

from calc.calibration import Calibrated, calibrated
from calc.commands import COMMANDS, command_line
from calc.errors import InputError, validated
from pages.ui import scenario, scenario_link, stored_results, views
from pages.ui.fields import Fields, Groups, ask_folded, ask_open, fields_of, means_the_same, redraw_if_put
from pages.ui.scenario import Missing, Side, Subject, View
from pages.ui.text import plain
from pages.ui.views import Metric, Numbers, Verdict

Options = Mapping[str, Mapping[str, Any]]  # the folded options' values, by the scenario's prefix

_FIGURES = 4  # of each question on an overview


@dataclass(frozen=True, slots=True)
class Question:
    """A page that asks one command. `groups` orders the plan's fields: "" is open, the rest fold away.

    `headline` makes the figures on top of the answer; `charts` draws it, with a key that is unique on the page, and
    `table_chart` draws it once more next to the table; `after_table` tells more; `verdict` says whether it fits.
    """

    command: str
    intro: str
    groups: Groups
    headline: Callable[[Any, Numbers], list[Metric]]
    charts: Callable[[Any, Numbers, str], None]
    verdict: Callable[[Any, Numbers], Verdict] | None = None
    table_chart: Callable[[Any, Numbers, str], None] | None = None
    after_table: Callable[[Any, Side], None] | None = None

    def ask(self, side: Side, plan: BaseModel) -> Any:
        """The answer for one scenario. InputError when plan, model and GPU do not go together."""
        command = COMMANDS[self.command]
        return command.answer(
            plan, side.spec() if command.takes_model else None, side.gpu() if command.takes_gpu else None
        )

    def with_measured(self, side: Side, plan: BaseModel) -> tuple[BaseModel, tuple[str, ...]]:
        """The plan with what was measured on the scenario's GPU, when the sidebar asks for it; and where each figure is from."""
        at = scenario.view().calibrated
        if at == "off" or not COMMANDS[self.command].takes_gpu:
            return plan, ()
        return calibrated(plan, stored_results.calibration_of(side.gpu()), at)


def show(question: Question) -> None:
    """Draw the page of a question, for one scenario or two."""
    st.markdown(question.intro)
    _answers(question, _options(COMMANDS[question.command].plan.model_fields, question.groups))


@st.fragment
def _answers(question: Question, options: Options) -> None:
    """What a move of the page's own sliders redraws: all but the sidebar, whose options come as they are."""
    redraw_if_put()
    _side_by_side(lambda side: _answer(question, side, options[side.prefix]))
    scenario_link.link(_asked(COMMANDS[question.command].plan.model_fields))


def _options(fields: Fields, groups: Groups) -> Options:
    """The folded options of each scenario, in the sidebar: there, a move of a slider on the page does not redraw them."""
    values = {}
    any_folded = not set(fields) <= set(groups.get("", ()))
    with st.sidebar:
        for side in scenario.sides():
            if any_folded:
                st.markdown("**Options of the second scenario**" if side.prefix else "**Options**")
            values[side.prefix] = ask_folded(fields, groups, side.prefix)
    return values


def _side_by_side(draw: Callable[[Side], None]) -> None:
    """Each scenario in its column (one above the other where the screen is narrow); bad input ends its own column only."""
    sides = scenario.sides()
    for side, column in zip(sides, st.columns(len(sides), gap="large"), strict=True):
        with column, complaints():
            draw(side)


def _asked(fields: Fields) -> dict[str, FieldInfo]:
    """What the widgets of this page and of the sidebar ask, by key."""
    each = [(side.prefix, {**Subject.model_fields, **fields}) for side in scenario.sides()]
    return dict(View.model_fields) | {prefix + name: field for prefix, found in each for name, field in found.items()}


def _answer(question: Question, side: Side, options: Mapping[str, Any]) -> None:
    """One scenario: what is asked and what comes of it."""
    command, numbers = COMMANDS[question.command], Numbers(scenario.view().units)
    if command.takes_model:
        st.markdown(f"##### {_title(side, command.takes_gpu)}")
    top = st.container()
    plan = validated(command.plan, {**options, **ask_open(command.plan.model_fields, question.groups, side.prefix)})
    filled, notes = question.with_measured(side, plan)
    answer = question.ask(side, filled)
    with top:
        _verdict(question, answer, numbers)
        views.headline(question.headline(answer, numbers))
        views.calibration(notes)
    question.charts(answer, numbers, side.prefix)
    _table(question, answer, numbers, side)
    if question.after_table:
        question.after_table(answer, side)
    views.formulas(answer.breakdown, numbers, side.prefix)
    views.downloads(Calibrated(answer, notes) if notes else answer, command.name, side.prefix)
    st.caption("The same on the command line:")
    words = command_line(command, plan, side.model_argument(), side.gpu_flags())
    words += f" --calibrated {scenario.view().calibrated}" if notes else ""
    st.code(words, language="bash", wrap_lines=True)
    views.remarks(answer)


def _table(question: Question, answer: Any, numbers: Numbers, side: Side) -> None:
    """The table, next to what the question draws; above it where two scenarios share the width."""
    if question.table_chart:
        left, right = st.columns(2) if len(scenario.sides()) == 1 else (st.container(), st.container())
        with left:
            question.table_chart(answer, numbers, side.prefix)
        with right:
            views.table(answer.breakdown, numbers)
    else:
        views.table(answer.breakdown, numbers)


def _verdict(question: Question, answer: Any, numbers: Numbers) -> None:
    if question.verdict:
        views.verdict(question.verdict(answer, numbers))


def _title(side: Side, with_gpu: bool) -> str:
    model, gpu = plain(side.model), plain(side.subject.gpu)
    return f"{model} on {gpu}" if with_gpu else model


def overview(intro: str, groups: Groups, pages: Sequence[ModuleType], notes: Mapping[ModuleType, str]) -> None:
    """The questions of several pages at a glance: the first figures of each, and a link that takes the scenario there.

    `notes` says what a page's figures are where they are not the scenario's own.
    """
    st.markdown(intro)
    fields = fields_of([COMMANDS[page.QUESTION.command].plan for page in pages])
    named = {name: fields[name] for names in groups.values() for name in names}
    _glance(groups, pages, notes, named, _options(named, groups))


@st.fragment
def _glance(
    groups: Groups, pages: Sequence[ModuleType], notes: Mapping[ModuleType, str], asked: Fields, options: Options
) -> None:
    _side_by_side(
        lambda side: _cards(side, pages, notes, {**options[side.prefix], **ask_open(asked, groups, side.prefix)}, asked)
    )
    scenario_link.link(_asked(asked))


def _cards(
    side: Side,
    pages: Sequence[ModuleType],
    notes: Mapping[ModuleType, str],
    values: Mapping[str, Any],
    asked: Fields,
) -> None:
    """A card for each page; what several of them complain of is said by the first."""
    st.markdown(f"##### {_title(side, with_gpu=True)}")
    said: set[str] = set()
    for page in pages:
        plan = COMMANDS[page.QUESTION.command].plan
        carried = {name: field for name, field in plan.model_fields.items() if means_the_same(name, field, asked)}
        with st.container(border=True), complaints(said):
            st.page_link(
                page_of(page), label=f"**{page.TITLE}** →", query_params=scenario_link.changed(_asked(carried))
            )
            if page in notes:
                st.caption(notes[page])
            _card(page.QUESTION, side, validated(plan, {name: values[name] for name in carried}))


def _card(question: Question, side: Side, plan: BaseModel) -> None:
    numbers = Numbers(scenario.view().units)
    filled, notes = question.with_measured(side, plan)
    answer = question.ask(side, filled)
    _verdict(question, answer, numbers)
    views.headline(question.headline(answer, numbers)[:_FIGURES], in_card=True)
    views.calibration(notes)


def page_of(page: ModuleType, default: bool = False) -> Page:
    """The page at the URL of its file's name; the default one also answers at /."""
    name = page.__name__.rpartition(".")[2]
    return st.Page(page.render, title=page.TITLE, icon=page.ICON, url_path=name, default=default)


@contextmanager
def complaints(said: set[str] | None = None) -> Iterator[None]:
    """Bad input ends this part of the page with one message; the rest, and every widget's value, stays.

    `said` gathers the messages of several parts: each is shown once, and the later parts refer to it.
    """
    said = set() if said is None else said
    try:
        yield
    except InputError as error:
        message = str(error)
        if message in said:
            st.caption("No answer, for the reason given above.")
        else:
            said.add(message)
            (st.info if isinstance(error, Missing) else st.error)(plain(message))
