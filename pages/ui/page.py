"""How every page of an answer is built: ribbon, picture, four figures, the levers, and tabs for all the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import streamlit as st
from pydantic import BaseModel
from streamlit.navigation.page import Page

from calc.commands import COMMANDS
from calc.errors import InputError
from calc.measurements.calibration import Calibrated, calibrated
from pages.ui import compare, link, pins, scenario, views, widgets
from pages.ui.answers import other_tools, sweep
from pages.ui.fields import Groups, fields_of
from pages.ui.measuring import store
from pages.ui.numbers import Figure, Numbers, figures
from pages.ui.parts import Parts
from pages.ui.scenario import Missing, Scenario
from pages.ui.text import plain
from pages.ui.views import Verdict

Tab = Callable[[Any, Numbers, Scenario], None]

_GOOD: Final = "last good scenario of "


@dataclass(frozen=True, slots=True)
class Question:
    """A page that asks one command.

    `levers` are the assumptions that move the answer most, shown in the ribbon; `sliders` the fields in plain sight; `groups`
    the rest, folded in the sidebar. `picture` draws the answer, `figures` makes at most four figures under it, `tabs` the rest.
    `bar` is the answer as one bar, where scenarios are compared. `spread` asks for the number of GPUs and the layout.
    `hidden` says which groups the scenario leaves without effect.
    """

    command: str
    figures: Callable[[Any, Numbers, Scenario], list[Figure]]
    picture: Tab
    levers: Sequence[str] = ()
    sliders: Sequence[str] = ()
    groups: Groups = field(default_factory=dict)
    tabs: Mapping[str, Tab] = field(default_factory=dict)
    verdict: Callable[[Any, Numbers], Verdict] | None = None
    bar: Callable[[Any], Parts] | None = None
    hidden: Callable[[Scenario, str], bool] = lambda *_: False
    spread: bool = False

    @property
    def plan(self) -> type[BaseModel]:
        return COMMANDS[self.command].plan

    def ask(self, asked: Scenario) -> tuple[Any, tuple[str, ...]]:
        """The answer for a scenario, and what of it was measured. InputError when plan, model and GPU do not go together."""
        command = COMMANDS[self.command]
        plan = asked.of(command.plan)
        notes: tuple[str, ...] = ()
        at = asked.of(scenario.View).calibrated
        if at != "off" and command.takes_gpu:
            plan, notes = calibrated(plan, store.calibration_of(asked.gpu()), at)
        spec = asked.spec() if command.takes_model else None
        return command.answer(plan, spec, asked.gpu() if command.takes_gpu else None), notes


def show(question: Question) -> None:
    """Draw the page of a question."""
    if question.groups:
        with st.sidebar:
            st.markdown("**Options**")
            groups = {**question.groups, "Other": _ungrouped(question)}
            now = scenario.current()
            widgets.ask_groups(
                question.plan, {title: groups[title] for title in groups if not question.hidden(now, title)}
            )
    _page(question)


def _ungrouped(question: Question) -> list[str]:
    """The plan's fields that the page names nowhere."""
    named = {*question.levers, *question.sliders, *(name for names in question.groups.values() for name in names)}
    return [name for name in fields_of(question.plan) if name not in named]


@st.fragment
def _page(question: Question) -> None:
    """What a move of the page's own widgets redraws: all but the sidebar."""
    widgets.redraw_if_put()
    numbers = Numbers(scenario.view().units)
    top = st.container(gap="small")
    _sliders(question)
    found = _answered(question)
    with top:
        _ribbon(question, found, numbers)
    if found is None:
        link.write()
        return
    answer, notes, asked = found
    with top, _greyed(found, "figures"):
        question.picture(answer, numbers, asked)
        figures(question.figures(answer, numbers, asked))
        views.calibration(notes)
    _exports(question, answer, notes)
    if pins.kept():
        compare.show(question, numbers)
    _tabs(question, answer, numbers, asked)
    link.write()


Found = tuple[Any, tuple[str, ...], Scenario]


def _answered(question: Question) -> Found | None:
    """The answer; where the scenario has none, why, and the answer of the last one that had."""
    now, kept = scenario.current(), f"{_GOOD}{question.command}"
    try:
        answer, notes = question.ask(now)
    except InputError as error:
        (st.info if isinstance(error, Missing) else st.error)(plain(str(error)))
        if kept not in st.session_state or isinstance(error, Missing):
            return None
        good = Scenario(st.session_state[kept])
        return *question.ask(good), good
    st.session_state[kept] = dict(now.values)
    return answer, notes, now


@contextmanager
def _greyed(found: Found, part: str) -> Iterator[None]:
    """An answer that is not that of what the fields hold is drawn grey."""
    stale = widgets.refused() or dict(found[2].values) != dict(scenario.current().values)
    with st.container(key=f"{'stale' if stale else 'fresh'} {part}"):
        yield


def _ribbon(question: Question, found: Found | None, numbers: Numbers) -> None:
    """What is asked, whether it fits, and the assumptions that move the answer most."""
    now, command = scenario.current(), COMMANDS[question.command]
    if command.takes_model:
        on = f" on {_machines(question, now)}" if command.takes_gpu else ""
        st.markdown(f"## {plain(now.model_name)}{plain(on)}")
    if found and question.verdict:
        with _greyed(found, "verdict"):
            views.verdict(question.verdict(found[0], numbers))
    widgets.ask_row(question.plan, question.levers)


def _machines(question: Question, now: Scenario) -> str:
    count = now.gpus if question.spread and now.layout == "auto" else 0
    return f"{count:,} × {now.gpu_name}" if count else now.gpu_name


def _sliders(question: Question) -> None:
    with st.container(horizontal=True, gap="small", key="row of sliders"):
        if question.spread:
            for each in fields_of(scenario.Spread).values():
                if each.name == "layout" or scenario.current().layout == "auto":
                    widgets.ask(each)
        for name in question.sliders:
            if not (name in scenario.SPREAD and scenario.current().layout == "auto" and question.spread):
                widgets.ask(fields_of(question.plan)[name])


def _exports(question: Question, answer: Any, notes: tuple[str, ...]) -> None:
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        views.downloads(Calibrated(answer, notes) if notes else answer, question.command)
        st.button(
            "Pin",
            key="pin",
            on_click=_pin,
            icon=":material/keep:",
            disabled=len(pins.kept()) >= pins.MOST,
            help=f"Keep a copy of this scenario to compare with; up to {pins.MOST}. The link holds them all.",
        )


def _pin() -> None:
    link.touched()
    pins.add()


def _tabs(question: Question, answer: Any, numbers: Numbers, asked: Scenario) -> None:
    """Tabs of which only the open one is drawn."""
    named: dict[str, Tab] = {
        **question.tabs,
        "Sweep": lambda answer, numbers, asked: sweep.show(question, answer, numbers, asked),
        "Parts": lambda answer, numbers, _: views.table(answer.breakdown, numbers),
        "Formulas": lambda answer, numbers, _: views.formulas(answer.breakdown, numbers),
        "Assumptions": lambda answer, *_: views.remarks(answer),
        "Command": lambda _, __, asked: _command(question, asked),
    }
    opened = st.tabs(list(named), key=f"tabs of {question.command}", on_change="rerun")
    for tab, draw in zip(opened, named.values(), strict=True):
        if tab.open:
            with tab, complaints():
                draw(answer, numbers, asked)


def _command(question: Question, asked: Scenario) -> None:
    command = COMMANDS[question.command]
    words = asked.command_line(command, asked.of(command.plan))
    at = asked.of(scenario.View).calibrated
    words += f" --calibrated {at}" if at != "off" and command.takes_gpu else ""
    st.markdown("The same on the command line")
    st.code(words, language="bash", wrap_lines=True)
    other_tools.show(question.command, asked.of(command.plan), asked.model_argument())
    st.markdown("This scenario as a link")
    st.code(link.address(), language=None, wrap_lines=True)
    if not link.config_fits(asked):
        st.caption("This config.json is too long for a link: whoever opens it is asked for the file.")


def page_of(page: ModuleType, default: bool = False) -> Page:
    """The page at the URL of its file's name; the default one also answers at /."""
    name = page.__name__.rpartition(".")[2]
    return st.Page(page.render, title=page.TITLE, icon=page.ICON, url_path=name, default=default)


@contextmanager
def complaints() -> Iterator[None]:
    """Bad input ends this part of the page with one message; the rest, and every widget's value, stays."""
    try:
        yield
    except InputError as error:
        (st.info if isinstance(error, Missing) else st.error)(plain(str(error)))
