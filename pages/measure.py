"""Measure on this machine: real programs against the formulas that predict them."""

import streamlit as st

from calc.records import Records
from pages.ui import measured, measuring, scenario
from pages.ui.fields import ask_plan
from pages.ui.measuring import MeasurePlan
from pages.ui.page import complaints
from pages.ui.text import plain

TITLE, ICON = "Measure", ":material/biotech:"
PLANS = (MeasurePlan,)


def render() -> None:
    st.markdown(
        "A formula is trusted once it has been checked. Run a real program here and see each number against its prediction."
    )
    missing = measuring.why_not_installed()
    if missing:
        st.info(plain(missing), icon=":material/hourglass_top:")
    else:
        with complaints():
            measured.machine()
            _ask()
    measured.live()
    records = Records()
    with complaints():
        measured.roofs(records)
        measured.comparison(records)
        measured.history(records)
    if not measuring.refusal(st.context.headers, st.context.ip_address):
        with complaints():
            measured.take(records)


def _ask() -> None:
    plan = ask_plan(
        MeasurePlan,
        {
            "": ("workload", "size", "device", "own_model"),
            "Several devices": ("ranks",),
            "Limits": ("seconds", "memory_fraction"),
        },
    )
    assert isinstance(plan, MeasurePlan)
    model = scenario.sides()[0].model_argument()
    measured.about(plan)
    refused = measuring.refusal(st.context.headers, st.context.ip_address)
    if st.button("Run", type="primary", icon=":material/play_arrow:", disabled=bool(refused), help=refused or None):
        measured.begin(plan, model)
    if refused:
        st.caption(plain(refused))
    st.caption("The same on the command line:")
    st.code(" ".join(("python -m measure", *plan.arguments(model))), language="bash", wrap_lines=True)


if __name__ == "__main__":
    from app import main

    main()
