"""Does it fit? The chosen model on the chosen GPU, at a glance."""

import streamlit as st

TITLE, ICON = "Does it fit?", ":material/straighten:"
PLANS = ()


def render() -> None:
    st.write("…")


if __name__ == "__main__":
    from app import main

    main()
