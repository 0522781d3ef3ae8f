"""Attention's square of scores, the tiles that avoid it, and the softmax that makes them possible."""

from __future__ import annotations

import streamlit as st

from calc.errors import InputError
from calc.learn.attention_memory import (
    SOFTMAX_SOURCE,
    SOURCE,
    AttentionMemoryPlan,
    OnlineSoftmaxPlan,
    Traffic,
    online_softmax,
    read_scores,
    traffic,
)
from pages.ui import charts, scenario, widgets
from pages.ui.charts import Curve
from pages.ui.numbers import Figure, Numbers, figures


def show(numbers: Numbers) -> None:
    """Bytes kept and moved with their curve over tokens, then the online softmax block by block."""
    widgets.ask_row(AttentionMemoryPlan, list(AttentionMemoryPlan.model_fields))
    plan = scenario.current().of(AttentionMemoryPlan)
    now = traffic(plan)
    figures(
        [
            Figure("Moved, standard", numbers.show(now.standard), "between memory and chip, one head, forward"),
            Figure(
                "Moved, FlashAttention", numbers.show(now.flash), f"tiles of {now.block_queries} x {now.block_keys}"
            ),
            Figure("Written, standard", numbers.show(now.standard_kept), "scores and probabilities"),
            Figure("Kept, FlashAttention", numbers.show(now.flash_kept), "one logarithm of a sum for each query"),
        ]
    )
    _curve(plan, numbers)
    st.latex(
        r"\begin{gathered} "
        r"\text{standard} = 4 N d + 4 N^2 \\ "
        r"\text{FlashAttention} = 2 N d + \frac{N}{B_c} (3 N d + 4 N) \\ "
        r"B_c = \frac{M}{4 d} \text{ numbers} "
        r"\end{gathered}"
    )
    st.caption(f"Source: {SOURCE}")
    charts.title("Online softmax: one pass over the scores")
    widgets.ask_row(OnlineSoftmaxPlan, list(OnlineSoftmaxPlan.model_fields))
    asked = scenario.current().of(OnlineSoftmaxPlan)
    steps = online_softmax(read_scores(asked.scores), asked.scores_a_block)
    st.dataframe(
        {
            "Scores read": [", ".join(f"{score:g}" for score in step.block) for step in steps],
            "Largest so far": [f"{step.largest:g}" for step in steps],
            "Earlier sum times": [f"{step.correction:.6g}" for step in steps],
            "Sum": [f"{step.total:.6g}" for step in steps],
        },
        hide_index=True,
    )
    st.latex(
        r"\begin{gathered} "
        r"m' = \max(m, \max_j x_j) \\ "
        r"\ell' = \ell \, e^{m - m'} + \sum_j e^{x_j - m'} "
        r"\end{gathered}"
    )
    st.caption(f"Source: {SOFTMAX_SOURCE}")


def _curve(plan: AttentionMemoryPlan, numbers: Numbers) -> None:
    at = [1 << power for power in range(8, 18)]
    found = [(tokens, _at(plan, tokens)) for tokens in at]
    lines = [
        Curve("standard", [(tokens, each.standard if each else None) for tokens, each in found]),
        Curve("FlashAttention", [(tokens, each.flash if each else None) for tokens, each in found]),
    ]
    charts.title("Bytes moved against tokens")
    said = "Both grow with the square of the tokens, FlashAttention's by a smaller factor"
    charts.curves(lines, "tokens", "bytes", numbers, "attention traffic", said, now=plan.attention_tokens, steep=True)


def _at(plan: AttentionMemoryPlan, tokens: int) -> Traffic | None:
    try:
        return traffic(plan.model_copy(update={"attention_tokens": tokens}))
    except InputError:
        return None
