"""Models of the Hugging Face Hub, asked once an hour: a slider that moves finds the answer made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import streamlit as st

from calc.catalogue import look_on_hub
from calc.errors import InputError
from calc.model.spec import ModelSpec
from calc.parameters import parameters
from calc.sources.hub import SECONDS, HubId, parse_id
from calc.sources.hub import is_offline as is_offline
from calc.stored import Comparison, compared

_ASKED: Final = "ids asked of the Hub"
_one = threading.Semaphore()  # reads at a time, for the whole server: a large header keeps a processor for a while


def ask_for(hub_id: str | None) -> None:
    """A callback: a person of this session wants this model. What a link alone names is not fetched."""
    if found := parse_id(hub_id or ""):
        st.session_state.setdefault(_ASKED, set()).add(found)


def is_asked_for(hub_id: HubId) -> bool:
    """Whether a person of this session asked for it."""
    return hub_id in st.session_state.get(_ASKED, ())


def spec(hub_id: str) -> ModelSpec:
    """The model of an id. InputError when it cannot be had, within `calc.sources.hub.SECONDS`."""
    _ask("config", hub_id)
    return _spec(hub_id)


def stored(hub_id: str) -> Comparison | None:
    """What the files of the model store, against its exact count; None where that cannot be read. InputError as for `spec`."""
    _ask("stored", hub_id)
    return _stored(hub_id)


def _ask(question: str, hub_id: str) -> None:
    with st.spinner("Asking the Hugging Face Hub …"):
        complaint = _complaint(question, hub_id)
    if complaint:
        raise InputError(complaint)


@st.cache_data(ttl=30, max_entries=64, show_spinner=False)
def _complaint(question: str, hub_id: str) -> str:
    """Kept for a short while only: it can be tried again, and no slider waits for it at each move."""
    if not _one.acquire(timeout=SECONDS):
        return "hub_id: the server reads another model of the Hub; try again in a moment"
    try:
        _QUESTIONS[question](hub_id)
    except InputError as error:
        return str(error)
    finally:
        _one.release()
    return ""


@st.cache_resource(ttl=3600, max_entries=16, show_spinner=False)
def _spec(hub_id: str) -> ModelSpec:
    return look_on_hub(hub_id).spec()


@st.cache_resource(ttl=3600, max_entries=16, show_spinner=False)
def _stored(hub_id: str) -> Comparison | None:
    found = look_on_hub(hub_id, stored=True)
    return compared(found.stored, parameters(_spec(hub_id)), found.needed_config()) if found.stored else None


_QUESTIONS: Mapping[str, Callable[[str], Any]] = {"config": _spec, "stored": _stored}
