"""KV caches by kind of attention."""

from __future__ import annotations

import streamlit as st

from calc.learn.cache_kinds import SOURCE, CacheKindsPlan, cache_kinds
from pages.ui import charts, scenario, widgets
from pages.ui.charts import Curve
from pages.ui.numbers import Numbers


def show(numbers: Numbers) -> None:
    """The caches growing with the tokens, and one more token of each."""
    widgets.ask_row(CacheKindsPlan, list(CacheKindsPlan.model_fields))
    plan = scenario.current().of(CacheKindsPlan)
    found = cache_kinds(plan)
    charts.title("Cache of one sequence against its tokens")
    said = "; ".join(f"{each.name}: {numbers.show(each.bytes)} at {plan.cached} tokens" for each in found)
    lines = [Curve(each.name, each.points) for each in found]
    charts.curves(lines, "tokens", "bytes", numbers, "cache kinds", said, now=plan.cached, steep=True)
    st.dataframe(
        {
            "Kind and model": [each.name for each in found],
            "Layers": [each.layers for each in found],
            f"At {plan.cached:,} tokens": [numbers.show(each.bytes) for each in found],
            "One token more": [numbers.show(each.token_bytes) for each in found],
        },
        hide_index=True,
    )
    st.latex(r"\text{MHA, GQA, MQA: } 2 \cdot k \cdot d \cdot 2 \text{ bytes a token and layer}")
    st.latex(r"\text{MLA: } (r_{kv} + d_{rope}) \cdot 2 \text{ bytes, keys and values in one}")
    st.caption(
        f"Every head has its own keys (MHA), groups share them (GQA), or all do (MQA); a latent stands for them (MLA); most layers see a "
        f"window; or a state has a fixed size. 16 bits a number, no engine's blocks or padding. Source: {SOURCE}."
    )
