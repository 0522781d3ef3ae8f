"""Loss scaling, and sums that swallow small steps."""

from __future__ import annotations

import streamlit as st

from calc.learn.half_precision import SOURCE, HalfPrecisionPlan, scaled, summed
from pages.ui import charts, scenario, widgets
from pages.ui.charts import Curve
from pages.ui.numbers import Figure, Numbers, figures


def show(numbers: Numbers) -> None:
    """Gradients lost in fp16 by loss scale, then a weight that takes small steps in each format."""
    plan = scenario.current().of(HalfPrecisionPlan)
    charts.title("Gradients in fp16, by loss scale")
    widgets.ask_row(HalfPrecisionPlan, ("typical_gradient", "loss_scale_power"))
    found = scaled(plan.typical_gradient)
    now = found[plan.loss_scale_power]
    figures(
        [
            Figure("Loss scale", f"{2**now.power:,}", f"2 to the power {now.power}"),
            Figure("Became 0", f"{now.zero:.2%}", "gradients below half of fp16's smallest number"),
            Figure("Became infinite", f"{now.infinite:.2%}", "one such gradient, and the step is left out"),
        ]
    )
    lines = [
        Curve("became 0", [(each.power, 100 * each.zero) for each in found]),
        Curve("became infinite", [(each.power, 100 * each.infinite) for each in found]),
    ]
    said = "The share that becomes 0 falls with the scale, until large gradients become infinite"
    charts.curves(lines, "power of 2 of the loss scale", "", numbers, "loss scale", said, now=now.power, log=False)
    st.caption("In percent of 20,000 gradients, log-normal around the typical one; the same each time.")
    charts.title("A weight after many small steps")
    widgets.ask_row(HalfPrecisionPlan, ("weight", "weight_step", "weight_steps"))
    sums = summed(plan)
    figures([Figure(name, f"{value:.7g}", _lost(value, sums["exact"])) for name, value in sums.items()])
    st.latex(r"w + \Delta = w \quad \text{where} \quad |\Delta| < \tfrac{1}{2} \, \text{spacing}(w)")
    st.caption(f"Source: {SOURCE}. This is why a master copy of the weights in fp32 is kept.")


def _lost(value: float, exact: float) -> str:
    return f"{(value - exact) / exact:+.3%} of the exact sum"
