"""The operations of a layer on the GPU's roofline."""

from __future__ import annotations

import streamlit as st

from calc.learn.layer_roofline import SOURCE, LayerRooflinePlan, Roofline, layer_roofline
from pages.ui import charts, scenario, widgets
from pages.ui.charts import Curve
from pages.ui.numbers import Figure, Numbers, figures


def show(numbers: Numbers) -> None:
    """The roof of the scenario's GPU with the five operations below it."""
    widgets.ask_row(LayerRooflinePlan, list(LayerRooflinePlan.model_fields))
    asked = scenario.current()
    found = layer_roofline(asked.of(LayerRooflinePlan), asked.gpu())
    total = sum(each.seconds for each in found.operations)
    figures(
        [
            Figure(
                "Compute bounds from", f"{found.ridge:,.0f} FLOPs a byte", f"peak over bandwidth of {asked.gpu_name}"
            ),
            Figure("A layer's step", numbers.show(total, "seconds"), "the roof's least time; real kernels take longer"),
        ]
    )
    charts.title(f"Reachable FLOP/s of {asked.gpu_name} by FLOPs a byte")
    _picture(found, numbers)
    st.dataframe(
        {
            "Operation": [each.name for each in found.operations],
            "FLOPs": [f"{each.flops:,}" for each in found.operations],
            "Bytes": [f"{each.bytes:,}" for each in found.operations],
            "FLOPs a byte": [f"{each.intensity:.4g}" for each in found.operations],
            "Least time": [numbers.show(each.seconds, "seconds") for each in found.operations],
            "Bound by": ["compute" if each.compute_bound else "memory" for each in found.operations],
        },
        hide_index=True,
    )
    st.latex(r"\text{reachable} = \min(\text{peak}, \; \text{FLOPs a byte} \cdot \text{bandwidth})")
    st.caption(f"Source: {SOURCE}; peaks and bandwidth are the vendor's.")


def _picture(found: Roofline, numbers: Numbers) -> None:
    at = sorted({2.0**power for power in range(-2, 14)} | {found.ridge})
    lines = [Curve("roof", [(each, found.attainable(each)) for each in at])]
    lines += [Curve(each.name, [(each.intensity, found.attainable(each.intensity))]) for each in found.operations]
    said = "; ".join(
        f"{each.name}: {each.intensity:.4g} FLOPs a byte, {'compute' if each.compute_bound else 'memory'} bounds it"
        for each in found.operations
    )
    charts.curves(lines, "FLOPs a byte", "FLOPs", numbers, "layer roofline", said, now=found.ridge, steep=True)
