"""Speculative decoding's expected gain."""

from __future__ import annotations

import streamlit as st

from calc.learn.speculation import SOURCE, SpeculationPlan, gains
from pages.ui import charts, scenario, widgets
from pages.ui.charts import Curve
from pages.ui.numbers import Figure, Numbers, figures


def show(numbers: Numbers) -> None:
    """The gain of the chosen draft, the best one, and the curve over lengths."""
    widgets.ask_row(SpeculationPlan, list(SpeculationPlan.model_fields))
    plan = scenario.current().of(SpeculationPlan)
    found = gains(plan)
    now, best = found[plan.drafted], max(found, key=lambda each: each.speedup)
    figures(
        [
            Figure("Tokens a round", f"{now.tokens:.4g}", "in expectation; one comes from the large model itself"),
            Figure("Faster by", numbers.ratio(now.speedup), "below 1 it is slower than no draft"),
            Figure("Best draft", f"{best.drafted} tokens", f"{numbers.ratio(best.speedup)} as fast"),
        ]
    )
    charts.title("Gain against the draft's length")
    lines = [
        Curve("tokens a round", [(each.drafted, each.tokens) for each in found]),
        Curve("times as fast", [(each.drafted, each.speedup) for each in found]),
    ]
    said = f"The gain is largest with {best.drafted} drafted tokens"
    charts.curves(lines, "drafted tokens", "", numbers, "speculation", said, now=plan.drafted, log=False)
    st.latex(
        r"\begin{gathered} "
        r"E = \frac{1 - \alpha^{\gamma + 1}}{1 - \alpha} \\ "
        r"\text{faster by } \frac{1 - \alpha^{\gamma + 1}}{(1 - \alpha)(\gamma c + 1)} "
        r"\end{gathered}"
    )
    st.caption(
        f"Source: {SOURCE}. It holds while memory bounds a step, so that checking several tokens costs no more than one."
    )
