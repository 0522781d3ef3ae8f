"""Measure on this machine: real programs against the formulas that predict them."""

import streamlit as st

from calc.records import Records
from pages.ui import measurement_runs, measurement_views, scenario
from pages.ui.fields import ask_plan
from pages.ui.measurement_runs import MeasurePlan
from pages.ui.page import complaints
from pages.ui.text import plain

TITLE, ICON = "Measure", ":material/biotech:"
PLANS = (MeasurePlan,)


def render() -> None:
    st.markdown(
        "A formula is trusted once it has been checked. Run a real program here and see each number against its prediction."
    )
    missing = measurement_runs.why_not_installed()
    if missing:
        st.info(plain(missing), icon=":material/hourglass_top:")
    else:
        with complaints():
            measurement_views.machine()
            _ask()
    measurement_views.live()
    records = Records()
    with complaints():
        measurement_views.roofs(records)
        measurement_views.comparison(records)
        measurement_views.history(records)
    if not measurement_runs.refusal(st.context.headers, st.context.ip_address):
        with complaints():
            measurement_views.take(records)


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
    measurement_views.about(plan)
    refused = measurement_runs.refusal(st.context.headers, st.context.ip_address)
    if st.button("Run", type="primary", icon=":material/play_arrow:", disabled=bool(refused), help=refused or None):
        measurement_views.begin(plan, model)
    if refused:
        st.caption(plain(refused))
    st.caption("The same on the command line:")
    st.code(" ".join(("python -m measure", *plan.arguments(model))), language="bash", wrap_lines=True)


if __name__ == "__main__":
    from app import main

    main()
