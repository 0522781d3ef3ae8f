"""Plumbline's entry point: page set-up, navigation, the shared sidebar. `streamlit run app.py` serves it."""

from types import ModuleType

import streamlit as st
from streamlit.navigation.page import Page

from pages import compute, measure, parameters, pipeline, start
from pages.ui import address, measuring, memory, sidebar

PAGES = (start, parameters, compute, pipeline, *((measure,) if measuring.is_offered() else ()))


def main() -> None:
    """One run of the app: set up, see which page is asked for, draw the sidebar and the page."""
    st.set_page_config("Plumbline", ":material/straighten:", "wide")
    pages = {_page(page): page for page in PAGES}
    chosen = st.navigation(list(pages))
    every = [page.PLANS for page in PAGES]
    address.check(every)
    memory.turn_to(pages[chosen].PLANS, every)
    sidebar.draw()
    st.title(chosen.title)
    chosen.run()


def _page(page: ModuleType) -> Page:
    """The page at the URL of its file's name; the start page also answers at /."""
    name = page.__name__.rpartition(".")[2]
    return st.Page(page.render, title=page.TITLE, icon=page.ICON, url_path=name, default=page is start)


if __name__ == "__main__":
    main()
