"""Widgets of a plan's fields. Each holds the text of its field's value in the scenario; a change goes there at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import streamlit as st
from pydantic import BaseModel

from calc.errors import InputError
from calc.units import show_count
from pages.ui import hub_models, link, scenario
from pages.ui.fields import SWITCH, Field, fields_of
from pages.ui.text import plain

Width = int | Literal["stretch", "content"]

_PUT, _WRONG = "widgets were put", "texts refused"


def ask_row(plan: type[BaseModel], names: Sequence[str]) -> None:
    """Widgets in a row that wraps where the screen is narrow."""
    if not names:
        return
    with st.container(horizontal=True, gap="small", key=f"row of {plan.__name__} {names[0]}"):
        for name in names:
            ask(fields_of(plan)[name])


def ask_groups(plan: type[BaseModel], groups: Mapping[str, Sequence[str]]) -> None:
    """The fields of each group folded under its title; only an open one sends its widgets."""
    for title, names in groups.items():
        if not title or not names:
            continue
        fold = st.expander(title, key=f"{plan.__name__} {title}", on_change="rerun")
        if fold.open:
            with fold:
                for name in names:
                    ask(fields_of(plan)[name], "stretch")


def ask(field: Field, width: Width = "stretch", *, slider: bool = True) -> None:
    """The widget of one field; a number whose field has stops gets a slider under it, unless `slider` is False."""
    look = field.appearance
    shared: dict[str, Any] = {
        "label": look.label,
        "key": _widget_key(field),
        "help": field.info.description,
        "width": width,
        "on_change": _changed,
        "args": (field,),
    }
    if field.key not in st.session_state.get(_WRONG, {}):
        st.session_state[_widget_key(field)] = _shown(field)
    if field.is_switch and not field.optional:
        st.toggle(**shared)
    elif field.choices:
        _choose(field, shared)
    elif field.is_switch:
        st.selectbox(options=list(SWITCH), **shared)
    elif look.stops and slider:
        _slide(field, shared)
    else:
        st.text_input(placeholder=look.placeholder, **shared)
    _complain(field)


def _choose(field: Field, shared: dict[str, Any]) -> None:
    named = field.appearance.named
    options = [*(["auto"] if field.optional else []), *field.choices]
    st.selectbox(options=options, format_func=lambda option: named.get(option, option), **shared)


def _slide(field: Field, shared: dict[str, Any]) -> None:
    """A number as text with a slider under it: exact where it is typed, quick where it is slid.

    A number between the stops is a stop of its own, so that both say the same.
    """
    look, value = field.appearance, scenario.current().value(field)
    slider = f"{_widget_key(field)} slider"
    with st.container(width=shared["width"], gap="xsmall"):
        st.text_input(placeholder=look.placeholder, **shared | {"width": "stretch"})
        stops = sorted({*look.stops, *([] if value is None else [value])})
        st.session_state[slider] = stops[0] if value is None else value
        st.select_slider(
            look.label,
            stops,
            key=slider,
            format_func=lambda stop: show_count(stop, 0) if stop >= 10**6 and stop in look.stops else f"{stop:,}",
            label_visibility="collapsed",
            on_change=_slid,
            args=(slider, field),
        )


def _slid(slider: str, field: Field) -> None:
    put({field.key: st.session_state[slider]}, redraw=False)


def _widget_key(field: Field) -> str:
    return f"{field.key}{scenario.WIDGET}"


def _shown(field: Field) -> Any:
    """A field's value as its widget holds it."""
    value = scenario.current().value(field)
    return value if field.is_switch and not field.optional else field.shown(value)


def _changed(field: Field) -> None:
    """A widget's callback: its text becomes the field's value; a text that cannot is said at the field, the last value stays."""
    link.touched()
    text = st.session_state[_widget_key(field)]
    wrong: dict[str, str] = st.session_state.setdefault(_WRONG, {})
    wrong.pop(field.key, None)
    try:
        value = field.checked(text) if isinstance(text, bool) else field.read(text or "")
    except InputError as error:
        wrong[field.key] = str(error)
        return
    scenario.keep(scenario.current().changed({field.key: value}))
    if field.key == "hub_id":  # typed here, not come with a link
        hub_models.ask_for(value)
    if not isinstance(text, bool):
        st.session_state[_widget_key(field)] = field.shown(value)


def _complain(field: Field) -> None:
    if complaint := st.session_state.get(_WRONG, {}).get(field.key):
        st.caption(f":red[{plain(complaint)}]")


def refused() -> bool:
    """Whether a field holds a text that is no value: the answer on screen is then the last good one."""
    return bool(st.session_state.get(_WRONG))


def put(values: Mapping[str, Any], redraw: bool = True) -> None:
    """A callback: give fields these values, by key; their widgets follow, wherever they are."""
    take(scenario.current().changed(values), redraw=redraw)


def take(wanted: scenario.Scenario, redraw: bool = True) -> None:
    """A callback: make this the session's scenario; the widgets follow."""
    link.touched()
    scenario.keep(wanted)
    st.session_state.pop(_WRONG, None)
    scenario.forget_widgets()
    st.session_state[_PUT] = redraw


def redraw_if_put() -> None:
    """Once after `put`, at the top of a fragment: draw the whole page, with the widgets that lie outside the fragment."""
    if st.session_state.pop(_PUT, False):
        st.rerun()
