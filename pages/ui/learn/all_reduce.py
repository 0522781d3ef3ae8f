"""The ring all-reduce step by step, next to a tree and a parameter server."""

from __future__ import annotations

import streamlit as st

from calc.learn.all_reduce import SOURCE, AllReducePlan, Volume, ring, volumes
from pages.ui import charts, scenario, widgets
from pages.ui.charts import Bar
from pages.ui.numbers import Figure, Numbers, figures


def show(numbers: Numbers) -> None:
    """What each rank has added up after so many steps, then what each way of adding up costs."""
    widgets.ask_row(AllReducePlan, list(AllReducePlan.model_fields))
    plan = scenario.current().of(AllReducePlan)
    now = ring(plan)
    phase = "reduce-scatter" if plan.ring_step < plan.ring_ranks - 1 else "all-gather"
    over = "over" if plan.ring_step == now.steps else f"next: {phase}"
    charts.title(f"Step {plan.ring_step} of {now.steps}: ranks whose numbers each chunk holds ({over})")
    bars = [
        Bar(
            f"rank {rank}", chunk, chunk + 1, str(count), _kind(count, plan.ring_ranks), f"chunk {chunk}: {count} ranks"
        )
        for rank, row in enumerate(now.summed)
        for chunk, count in enumerate(row)
    ]
    charts.lanes(
        bars, "chunk", "ring", f"Chunks by rank after step {plan.ring_step}: " + str(list(map(list, now.summed)))
    )
    found = volumes(plan)
    figures([Figure("Sent by a rank so far", numbers.show(now.sent)), *(_figure(each, numbers) for each in found)])
    st.latex(
        r"\begin{gathered} "
        r"\text{ring} = \frac{2 (n - 1)}{n} S \\ "
        r"\text{parameter server} = (n - 1) S "
        r"\end{gathered}"
    )
    st.caption(
        f"Source: {SOURCE}. A ring sends the same at any number of ranks, and takes more steps; a tree takes few steps, for short "
        "messages; the server's own link carries what all others send."
    )


def _kind(count: int, ranks: int) -> str:
    return "its own numbers" if count == 1 else "the whole sum" if count == ranks else "a partial sum"


def _figure(volume: Volume, numbers: Numbers) -> Figure:
    return Figure(
        volume.name.capitalize(),
        numbers.show(volume.busiest),
        f"sent by its busiest rank; {volume.steps} steps in a row",
    )
