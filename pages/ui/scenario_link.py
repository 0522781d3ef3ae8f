"""A scenario to take away as a link."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit, urlunsplit

import streamlit as st
from pydantic.fields import FieldInfo

from pages.ui.field_display import CUSTOM
from pages.ui.fields import written
from pages.ui.scenario import PREFIXES

Asked = Mapping[str, FieldInfo]  # what widgets ask, by key


def link(asked: Asked) -> None:
    """The page's address with every widget's value that is not its default, right or wrong."""
    values = changed(asked)
    place = urlsplit(st.context.url or "")
    with st.expander("This scenario as a link", icon=":material/link:"):
        st.code(
            urlunsplit((place.scheme, place.netloc, place.path, urlencode(values), "")), language=None, wrap_lines=True
        )
        if CUSTOM in [values.get(f"{prefix}model") for prefix in PREFIXES]:
            st.caption(
                "A config.json of your own does not fit in a link: whoever opens this one is asked for the file."
            )


def changed(asked: Asked) -> dict[str, str]:
    """What the widgets hold where it differs from their defaults, as the URL writes it."""
    held = {key: written(field, st.session_state[key]) for key, field in asked.items() if key in st.session_state}
    defaults = {key: written(field, field.get_default(call_default_factory=True)) for key, field in asked.items()}
    return {key: text for key, text in held.items() if text != defaults[key]}
