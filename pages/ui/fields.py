"""Widgets made from a plan's fields. A field's name is its widget's key and its URL parameter, and its flag with dashes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import streamlit as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from calc.commands import choices, is_switch
from calc.errors import InputError, validated
from calc.units import show_count
from pages.ui.field_display import LOOKS, Look

Groups = Mapping[str, Sequence[str]]
Fields = Mapping[str, FieldInfo]

_AUTO, _ON, _OFF = "auto", "on", "off"
_SWITCH = {_AUTO: None, _ON: True, _OFF: False}
_PUT = "widgets were put"
_LARGEST = 2**53 - 1  # what a browser's number holds exactly
_WIDTH, _WIDE = 171, 222  # pixels of one widget; a row holds as many as fit


def ask_plan(plan: type[BaseModel], groups: Groups, prefix: str = "") -> BaseModel:
    """The plan that the widgets describe, all in one place: the group "" in a row, the others folded under it.

    InputError when its fields do not go together.
    """
    values = ask_open(plan.model_fields, groups, prefix)
    with st.expander("More options", icon=":material/tune:"):
        values |= ask_folded(plan.model_fields, groups, prefix)
    return validated(plan, values)


def ask_open(fields: Fields, groups: Groups, prefix: str = "") -> dict[str, Any]:
    """The values of the group "", in a row that wraps where the screen is narrow."""
    with st.container(horizontal=True, gap="small"):
        return {name: ask(name, fields[name], prefix) for name in groups.get("", ()) if name in fields}


def ask_folded(fields: Fields, groups: Groups, prefix: str = "") -> dict[str, Any]:
    """The values of all other fields, each group under its title; those that no group names come last."""
    named = {name for names in groups.values() for name in names}
    values: dict[str, Any] = {}
    for title, names in [*groups.items(), ("Other", [name for name in fields if name not in named])]:
        known = [name for name in names if name in fields]
        if title and known:
            with st.expander(title):
                values |= {name: ask(name, fields[name], prefix, "stretch") for name in known}
    return values


def put(values: Mapping[str, Any], prefix: str) -> None:
    """A button's callback: set the widgets of these fields, wherever they are; `redraw_if_put` then shows them all."""
    for name, value in values.items():
        st.session_state[prefix + name] = value
    st.session_state[_PUT] = True


def redraw_if_put() -> None:
    """Once after `put`, at the top of a fragment: draw the whole page, with the widgets that lie outside the fragment."""
    if st.session_state.pop(_PUT, False):
        st.rerun()


def fields_of(plans: Sequence[type[BaseModel]]) -> dict[str, FieldInfo]:
    """The fields of the plans by name; of several with one name, the first plan's."""
    return {name: field for plan in reversed(plans) for name, field in plan.model_fields.items()}


def meaning(field: FieldInfo) -> tuple[str, str]:
    """What two fields of one name must share for one widget to hold both: type and default."""
    return str(field.annotation), repr(field.default)


def means_the_same(name: str, field: FieldInfo, asked: Fields) -> bool:
    """Whether a widget of that name was asked for, and holds what the field means."""
    return name in asked and meaning(field) == meaning(asked[name])


def refusal(plan: type[BaseModel], name: str, text: str) -> str:
    """Why the field cannot take that text from a URL, as "it must be ..."; "" when it can."""
    field, look = plan.model_fields[name], LOOKS.get(name, Look())
    if field.default is None and text == "":
        return ""
    options = _options(field, look)
    if options:
        return "" if text in options else _one_of(options, text)
    try:
        validated(plan, {name: text})
    except InputError as error:  # rules across fields are for the page, where all fields are known
        if error.field == name:
            return str(error).partition("is not allowed; ")[2] or str(error)
    if _kinds(field) & {int, float} and not abs(float(text)) <= _LARGEST:  # NaN too
        return f"it must be a number of at most {_LARGEST:,}"
    return ""


def _one_of(options: Sequence[str], text: str) -> str:
    if len(options) <= 12:
        return f"it must be one of {', '.join(options)}"
    close = difflib.get_close_matches(text, options, n=3, cutoff=0.5)
    return f"it must be one of the {len(options)} names of the list{'; close ones are ' if close else ''}{', '.join(close)}"


def _kinds(field: FieldInfo) -> set[Any]:
    several = get_origin(field.annotation) in (UnionType, Union)
    return set(get_args(field.annotation) if several else (field.annotation,))


def _options(field: FieldInfo, look: Look) -> tuple[str, ...]:
    """What the field's widget writes into the URL, when that is one of a few words."""
    if is_switch(field):
        return tuple(_SWITCH) if _unset(field) else ("true", "false")
    options = tuple(str(each) for each in look.choices or choices(field))
    return (_AUTO, *options) if options and field.default is None else options


def written(field: FieldInfo, value: Any) -> str:
    """A value as the field's widget writes it into the URL."""
    if value is None:
        return _AUTO if choices(field) or is_switch(field) else ""
    if isinstance(value, bool):
        return next(name for name, meant in _SWITCH.items() if meant is value) if _unset(field) else str(value).lower()
    if isinstance(value, tuple):
        return ",".join(written(field, part) for part in value)
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _unset(field: FieldInfo) -> bool:
    return NoneType in _kinds(field)


def ask(name: str, field: FieldInfo, prefix: str = "", width: int | Literal["stretch"] = _WIDTH) -> Any:
    """The value of one field, from the widget that suits its type, `width` pixels wide."""
    key, look = prefix + name, LOOKS.get(name, Look())
    shared = {
        "label": look.label or name.replace("_", " ").capitalize(),
        "key": key,
        "help": field.description,
        "bind": "query-params",
        "width": _WIDE if look.wide and width == _WIDTH else width,
    }
    default = field.get_default(call_default_factory=True)
    if key in st.session_state and key not in st.query_params:
        st.session_state[key] = st.session_state[key]  # what another page set, the URL still lacks
    widget = _widget(field, look)
    return widget(shared, field, default, look)


def _widget(field: FieldInfo, look: Look) -> Callable[[dict[str, Any], FieldInfo, Any, Look], Any]:
    kinds = _kinds(field)
    if is_switch(field):
        return _ask_switch if _unset(field) else _ask_toggle
    if look.choices or choices(field):
        return _ask_choice
    if look.stops:
        return _ask_slider
    if kinds & {int, float}:
        return _ask_number
    return _ask_text


def _ask_toggle(shared: dict[str, Any], field: FieldInfo, default: Any, look: Look) -> Any:
    return st.toggle(value=default, **shared)


def _ask_switch(shared: dict[str, Any], field: FieldInfo, default: Any, look: Look) -> Any:
    start = next(name for name, value in _SWITCH.items() if value is default)
    return _SWITCH[st.selectbox(options=list(_SWITCH), index=list(_SWITCH).index(start), **shared)]


def _ask_choice(shared: dict[str, Any], field: FieldInfo, default: Any, look: Look) -> Any:
    options = look.choices or choices(field)
    if default is None:  # left out, the answer picks one itself
        chosen = st.selectbox(options=[_AUTO, *options], **shared)
        return None if chosen == _AUTO else chosen
    return st.selectbox(options=options, index=options.index(default), **shared)


def _ask_number(shared: dict[str, Any], field: FieldInfo, default: Any, look: Look) -> Any:
    whole = int in _kinds(field)
    start = default if default is None or whole else float(default)
    look_of_number = {"step": look.step or 1} if whole else {"step": float(look.step or 0.1), "format": "%g"}
    return st.number_input(value=start, placeholder=_AUTO, **look_of_number, **shared)


def _ask_text(shared: dict[str, Any], field: FieldInfo, default: Any, look: Look) -> Any:
    return st.text_input(
        value=None if default is None else written(field, default), placeholder=look.placeholder, **shared
    )


def _ask_slider(shared: dict[str, Any], field: FieldInfo, default: Any, look: Look) -> Any:
    """A number with a slider under it: exact where it is typed, quick where it is slid. Only the number is in the URL.

    A number between the stops is a stop of its own, so that both say the same.
    """
    key = shared["key"]
    slider = f"{key} slider"
    with st.container(width=shared["width"], gap="xsmall"):
        value = _ask_number(shared | {"width": "stretch"}, field, default, look)
        stops = sorted({*look.stops, value})
        st.session_state[slider] = value
        st.select_slider(
            shared["label"],
            stops,
            key=slider,
            format_func=lambda stop: show_count(stop, 0) if stop >= 10**6 and stop in look.stops else f"{stop:,}",
            label_visibility="collapsed",
            on_change=_slide,
            args=(slider, key),
        )
    return value


def _slide(slider: str, key: str) -> None:
    st.session_state[key] = st.session_state[slider]
