"""Plumbline's entry point: page set-up, navigation, the shared sidebar. `streamlit run app.py` serves it."""

from pathlib import Path

import streamlit as st

from pages import compute, kv_cache, measure, parameters, pipeline, start, training
from pages.ui import link, sidebar
from pages.ui.measuring import runs
from pages.ui.page import page_of

PAGES = (start, training, kv_cache, compute, pipeline, parameters, *((measure,) if runs.is_offered() else ()))

_UI = Path(__file__).parent / "pages" / "ui"
_ICON, _STYLE = _UI / "icon.svg", _UI / "style.css"


def main() -> None:
    """One run of the app: set up, see which page is asked for, draw the sidebar and the page."""
    st.set_page_config("Plumbline", str(_ICON), "wide")
    pages = {page_of(page, default=page is start): page for page in PAGES}
    chosen = st.navigation(list(pages), position="top")
    page = pages[chosen]
    st.set_page_config(f"{page.TITLE} · Plumbline", initial_sidebar_state="collapsed" if page is start else "auto")
    st.html(_STYLE)
    link.follow(page.PLANS, [each.PLANS for each in PAGES])
    st.title(page.HEADING, anchor=False)
    if page is not start:
        sidebar.draw(takes_runs=page in (training, kv_cache))
    chosen.run()


if __name__ == "__main__":
    main()
