"""Pins: copies of the scenario, up to five, to compare with what is on screen; a link holds them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import urlencode

import streamlit as st
from pydantic import BaseModel

from calc.commands import COMMANDS
from pages.ui.fields import fields_of
from pages.ui.scenario import SHARED, Scenario, current, start

MOST: Final = 5
_PINS: Final = "pins"


def kept() -> list[Scenario]:
    """The pins of this session."""
    return [Scenario(values) for values in st.session_state.get(_PINS, [])]


def keep(pins: Iterable[Scenario]) -> None:
    """Make these the session's pins; those beyond the fifth are left out."""
    st.session_state[_PINS] = [dict(pin.values) for pin in pins][:MOST]


def add() -> None:
    """Pin what is on screen."""
    keep([*kept(), current()])


def remove(index: int) -> None:
    """Take a pin away."""
    pins = kept()
    del pins[index]
    keep(pins)


def plans() -> list[type[BaseModel]]:
    """The plans whose values a pin keeps."""
    return [*SHARED, *(command.plan for command in COMMANDS.values())]


def written(pin: Scenario) -> str:
    """A pin as a link holds it: model, GPU and every value that is not where the app starts."""
    texts = {"model": pin.subject.model, "gpu": pin.subject.gpu}
    for plan in plans():
        for field in fields_of(plan).values():
            value = pin.value(field)
            if value != start(field):
                texts[field.key] = field.write(value)
    return urlencode(texts)


def differing(scenarios: Sequence[Scenario], asked: Sequence[type[BaseModel]]) -> dict[str, list[str]]:
    """The inputs in which the scenarios differ, by label: the text of each."""
    found: dict[str, list[str]] = {}
    for plan in (*SHARED, *asked):
        for field in fields_of(plan).values():
            texts = [field.write(each.value(field)) for each in scenarios]
            if len(set(texts)) > 1:
                named = field.appearance.named
                found[field.appearance.label] = [named.get(text, text) or "auto" for text in texts]
    return found
