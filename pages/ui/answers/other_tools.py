"""The scenario as other tools run it: their command lines and config files."""

from __future__ import annotations

import streamlit as st
from pydantic import BaseModel

from calc.errors import InputError
from pages.ui.text import plain


def show(command: str, plan: BaseModel, model: str) -> None:
    """Choose a tool, and see the scenario in its form, or why it has none there; nothing where no tool runs the question."""
    from calc.external_formats.formats import TOOLS, WRITTEN, write

    tools = [name for name in WRITTEN if TOOLS[name].command == command]
    if not tools:
        return
    tool = st.segmented_control("The same for another tool", tools, key=f"tool of {command}", default=tools[0])
    try:
        text, notes = write(tool or tools[0], model, plan)
    except InputError as error:
        st.info(plain(str(error)))
        return
    st.code(text, language=None, wrap_lines=True)
    if notes:
        st.caption("".join(f"\n- {plain(note)}" for note in notes))
