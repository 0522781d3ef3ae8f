"""Plumbline's entry point: page set-up, navigation, the shared sidebar. `streamlit run app.py` serves it."""

from pathlib import Path

import streamlit as st

from pages import compute, kv_cache, measure, parameters, pipeline, start, training
from pages.ui import address, measurement_runs, sidebar, widget_state
from pages.ui.page import page_of

PAGES = (
    start,
    parameters,
    training,
    kv_cache,
    compute,
    pipeline,
    *((measure,) if measurement_runs.is_offered() else ()),
)

_ICON = Path(__file__).parent / "pages" / "ui" / "icon.svg"


def main() -> None:
    """One run of the app: set up, see which page is asked for, draw the sidebar and the page."""
    st.set_page_config("Plumbline", str(_ICON), "wide")
    pages = {page_of(page, default=page is start): page for page in PAGES}
    chosen = st.navigation(list(pages))
    every = [page.PLANS for page in PAGES]
    address.check(every)
    widget_state.turn_to(pages[chosen].PLANS, every)
    sidebar.draw()
    st.title(chosen.title)
    chosen.run()


if __name__ == "__main__":
    main()
