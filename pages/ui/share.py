"""A scenario to take away: as a link, and as the equal command."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlencode, urlsplit, urlunsplit

import streamlit as st
from pydantic import BaseModel

from pages.ui.fields import written
from pages.ui.looks import CUSTOM


def link(models: Sequence[tuple[str, BaseModel]]) -> None:
    """The page's address with every value that is not a default. `models` are what the widgets hold, each with its prefix."""
    values = {prefix + name: value for prefix, model in models for name, value in changed(model).items()}
    place = urlsplit(st.context.url or "")
    st.code(urlunsplit((place.scheme, place.netloc, place.path, urlencode(values), "")), language=None, wrap_lines=True)
    if CUSTOM in (values.get("model"), values.get("b_model")):
        st.caption("A config.json of your own does not fit in a link: whoever opens it is asked for the file.")


def changed(model: BaseModel) -> dict[str, str]:
    """The fields that differ from their defaults, as a URL writes them."""
    values = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if value != field.get_default(call_default_factory=True):
            values[name] = written(field, value)
    return values
