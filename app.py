"""Plumbline's entry point: page set-up, navigation, the shared sidebar. `streamlit run app.py` serves it.

The server imports this file once, for `app`; each redraw runs it as __main__, which alone imports the pages: they are Streamlit's then.
"""

from pathlib import Path
from types import ModuleType

import streamlit as st

_UI = Path(__file__).parent / "pages" / "ui"
_ICON, _STYLE = _UI / "icon.svg", _UI / "style.css"


def pages() -> tuple[ModuleType, ...]:
    """The pages in the order of the navigation; the first is the one at /."""
    from pages import compute, kv_cache, learn, measure, parameters, pipeline, start, training
    from pages.ui.measuring import runs

    return start, training, kv_cache, compute, pipeline, parameters, learn, *((measure,) if runs.is_offered() else ())


def main() -> None:
    """One run of the app: set up, see which page is asked for, draw the sidebar and the page."""
    st.set_page_config("Plumbline", str(_ICON), "wide")
    offered = pages()
    from pages import kv_cache, training
    from pages.ui import link, sidebar
    from pages.ui.page import page_of

    by_address = {page_of(page, default=page is offered[0]): page for page in offered}
    chosen = st.navigation(list(by_address), position="top")
    page = by_address[chosen]
    st.set_page_config(f"{page.TITLE} · Plumbline", initial_sidebar_state="collapsed" if page is offered[0] else "auto")
    st.html(_STYLE)
    link.follow(page.PLANS, [each.PLANS for each in offered])
    st.title(page.HEADING, anchor=False)
    if page is not offered[0]:
        sidebar.draw(takes_runs=page in (training, kv_cache))
    chosen.run()


if __name__ == "__main__":
    main()
else:
    from pages.ui import server

    app = st.App(__file__, middleware=server.middleware(), routes=server.routes())
