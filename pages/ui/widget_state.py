"""What a page's widgets hold while another page is open.

Streamlit keeps the values of bound widgets under their names, so that `seq` set on one page is there on the next. A name
that two plans define differently (a LoRA rank that is off at 0, or 8) stays with its own plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import streamlit as st
from pydantic import BaseModel
from streamlit.errors import StreamlitAPIException

from pages.ui.fields import fields_of, meaning
from pages.ui.scenario import PREFIXES
from pages.ui.scenario_link import Asked, changed

_OPEN, _KEPT = "open plans", "kept values"

Plans = tuple[type[BaseModel], ...]


def turn_to(plans: Plans, everywhere: Iterable[Plans]) -> None:
    """Before the first widget: put away what belongs to the plans of the page before, bring back what belongs to these."""
    before: Plans = st.session_state.get(_OPEN, plans)
    st.session_state[_OPEN] = plans
    if before == plans:
        return
    kept = st.session_state.setdefault(_KEPT, {})
    differing = _differing({plan for each in everywhere for plan in each})
    for owner in before:
        for key in _keys(owner, differing):
            if key in st.session_state:
                kept[owner.__name__, key] = st.session_state.pop(key)
    for owner in plans:
        for key in _keys(owner, differing):
            if (owner.__name__, key) in kept and key not in st.query_params:
                st.session_state[key] = kept[owner.__name__, key]
    _take_over({prefix + name: field for prefix in PREFIXES for name, field in fields_of(plans).items()})


def _take_over(asked: Asked) -> None:
    """What widgets of other pages have set, this page's widgets and its URL take over."""
    for key, text in changed(asked).items():
        if key not in st.query_params:
            st.session_state[key] = st.session_state[key]  # a new widget takes only what is set in its own run
            with suppress(StreamlitAPIException):  # a name still tied to the page before: `fields.ask` sees to it
                st.query_params[key] = text


def _keys(plan: type[BaseModel], names: set[str]) -> list[str]:
    return [prefix + name for name in plan.model_fields if name in names for prefix in PREFIXES]


def _differing(plans: set[type[BaseModel]]) -> set[str]:
    """Names that two plans define with different types or defaults."""
    found: dict[str, set[tuple[str, str]]] = {}
    for plan in plans:
        for name, field in plan.model_fields.items():
            found.setdefault(name, set()).add(meaning(field))
    return {name for name, meanings in found.items() if len(meanings) > 1}
