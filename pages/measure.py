"""Measure on this machine: real programs against the formulas that predict them."""

import streamlit as st

from calc.measurements.records import Records
from pages.ui import link, scenario, widgets
from pages.ui.measuring import results, runs
from pages.ui.measuring.runs import MeasurePlan
from pages.ui.page import complaints
from pages.ui.text import plain

TITLE, HEADING, ICON = "Verify", "Verify: how far from reality?", ":material/biotech:"
PLANS = (MeasurePlan,)


def render() -> None:
    st.markdown(
        "A formula is trusted once it has been checked. Run a real program here and see each number against its prediction."
    )
    missing = runs.why_not_installed()
    if missing:
        st.info(plain(missing), icon=":material/hourglass_top:")
    else:
        with complaints():
            results.machine()
            _ask()
    results.live()
    records = Records()
    with complaints():
        results.roofs(records)
        results.comparison(records)
        results.history(records)
    if not runs.hindrance():
        with complaints():
            results.take(records)
    link.write()


def _ask() -> None:
    widgets.ask_row(MeasurePlan, ("workload", "size", "device", "own_model"))
    widgets.ask_groups(MeasurePlan, {"Several devices": ("ranks",), "Limits": ("seconds", "memory_fraction")})
    plan = scenario.current().of(MeasurePlan)
    model = scenario.current().model_argument()
    results.about(plan)
    refused = runs.hindrance()
    if st.button(
        "Run",
        key=runs.action_key("run"),
        type="primary",
        icon=":material/play_arrow:",
        disabled=bool(refused),
        help=refused or None,
    ):
        results.begin(plan, model)
    if refused:
        st.caption(plain(refused))
    runs.openness()
    st.caption("The same on the command line:")
    st.code(" ".join(("python -m measure", *plan.arguments(model))), language="bash", wrap_lines=True)


if __name__ == "__main__":
    from app import main

    main()
