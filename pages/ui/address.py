"""The URL against the schema, before the first widget: what Streamlit would drop without a word is named and left out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

import streamlit as st
from pydantic import BaseModel

from calc.errors import show
from pages.ui.fields import refusal
from pages.ui.scenario import SECOND, Subject, View
from pages.ui.text import plain

_REFUSED = "refused parameters"

Schema = Mapping[str, Sequence[type[BaseModel]]]
Plans = tuple[type[BaseModel], ...]


def check(pages: Iterable[Plans]) -> None:
    """Say what is wrong with the URL and go on without it; parameters that are right keep their values."""
    schema = _schema(pages)
    given = st.query_params.to_dict()
    refused = {name: text for name, value in given.items() if (text := complaint(schema, name, value))}
    if refused:
        st.session_state[_REFUSED] = list(refused.values())
        st.query_params.from_dict({name: value for name, value in given.items() if name not in refused})
        st.rerun()  # widgets take their first values from the URL as it was when the run began
    complaints = st.session_state.pop(_REFUSED, [])
    if complaints:
        st.error("The link asks for what cannot be; its other values are kept.\n\n" + _bullets(complaints))


def _schema(pages: Iterable[Plans]) -> Schema:
    """For each parameter, the models with a field of that name: one of them must take the value."""
    found: dict[str, list[type[BaseModel]]] = {}
    models: list[type[BaseModel]] = [Subject, View, *(plan for plans in pages for plan in plans)]
    for model in dict.fromkeys(models):
        for name in model.model_fields:
            found.setdefault(name, []).append(model)
    return found


def complaint(schema: Schema, name: str, value: str) -> str:
    """What is wrong with one parameter, naming it, its value and what is allowed; "" when nothing is."""
    field = name.removeprefix(SECOND)
    if field not in schema:
        close = difflib.get_close_matches(field, schema, n=2, cutoff=0.6)
        hint = f"; close ones are {' and '.join(close)}" if close else ""
        return f"{name}: unknown parameter (its value is {show(value)}){hint}"
    refusals = [refusal(model, field, value) for model in schema[field]]
    if not all(refusals):
        return ""
    return f"{name}: {show(value)} is not allowed; {refusals[0]}"


def _bullets(lines: list[str]) -> str:
    """A Markdown list whose lines show as typed: what came in with a link is never read as Markdown."""
    return "\n".join(f"- {plain(line)}" for line in lines)
