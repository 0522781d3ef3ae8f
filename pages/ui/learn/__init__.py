"""The topics of the page that teaches, and the one that is open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

import streamlit as st
from pydantic import BaseModel, ConfigDict, Field

from calc.model.bare import BareModelPlan
from pages.ui import link, scenario, widgets
from pages.ui.fields import fields_of
from pages.ui.learn import bare_model, number_formats
from pages.ui.numbers import Numbers
from pages.ui.page import complaints


class Topic(BaseModel):
    """Which topic is open."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    topic: Literal["bare-model", "number-formats"] = Field("bare-model", description="what to look at")


_SHOW: Final[Mapping[str, Callable[[Numbers], None]]] = {
    "bare-model": bare_model.show,
    "number-formats": number_formats.show,
}
PLANS = (Topic, BareModelPlan, number_formats.FormatChoice)


@st.fragment
def show() -> None:
    """Draw the open topic alone."""
    widgets.redraw_if_put()
    widgets.ask(fields_of(Topic)["topic"])
    with complaints():
        _SHOW[scenario.current().of(Topic).topic](Numbers(scenario.view().units))
    link.write()
