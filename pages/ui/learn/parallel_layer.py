"""A layer split over ranks."""

from __future__ import annotations

import streamlit as st

from calc.learn.parallel_layer import SOURCE, ParallelLayerPlan, parallel_layer
from pages.ui import scenario, widgets
from pages.ui.numbers import Figure, Numbers, figures


def show(numbers: Numbers) -> None:
    """Each operation on one rank, and what the rank sends."""
    widgets.ask_row(ParallelLayerPlan, list(ParallelLayerPlan.model_fields))
    plan = scenario.current().of(ParallelLayerPlan)
    found = parallel_layer(plan)
    alone = parallel_layer(plan.model_copy(update={"tensor_ranks": 1, "expert_ranks": 1}))
    figures(
        [
            Figure("Parameters on a rank", f"{found.parameters:,}", f"{alone.parameters:,} in the whole layer"),
            Figure("Sent by a rank", numbers.show(sum(each.bytes for each in found.sent)), "forward and backward"),
        ]
    )
    st.dataframe(
        {
            "Operation": [piece.name for piece in found.pieces],
            "Weight on a rank": [" × ".join(map(str, piece.shape)) for piece in found.pieces],
            "Parameters": [f"{piece.parameters:,}" for piece in found.pieces],
            "Numbers that it gives": [f"{piece.output:,}" for piece in found.pieces],
        },
        hide_index=True,
    )
    if found.sent:
        st.dataframe(
            {
                "Collective": [each.name for each in found.sent],
                "Ranks": [each.ranks for each in found.sent],
                "Calls": [each.calls for each in found.sent],
                "Sent by a rank": [numbers.show(each.bytes) for each in found.sent],
            },
            hide_index=True,
        )
    st.latex(
        r"\begin{gathered} "
        r"\text{tensor: } 4 \cdot \frac{2 (t - 1)}{t} \cdot 2 s b h \text{ bytes} \\ "
        r"\text{experts: } 4 \cdot \frac{e - 1}{e} \cdot 2 K s b h \text{ bytes} "
        r"\end{gathered}"
    )
    st.caption(f"Source: {SOURCE}. 16-bit activations, tokens spread evenly over experts.")
