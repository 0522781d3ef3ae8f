"""Blocks of a paged KV cache, shared and copied."""

from __future__ import annotations

import streamlit as st

from calc.learn.paged_blocks import SOURCE, PagedBlocksPlan, paged_blocks
from pages.ui import charts, scenario, widgets
from pages.ui.charts import Bar
from pages.ui.numbers import Figure, Numbers, figures


def show(numbers: Numbers) -> None:
    """The block table of each answer, and the slots that hold nothing."""
    widgets.ask_row(PagedBlocksPlan, list(PagedBlocksPlan.model_fields))
    plan = scenario.current().of(PagedBlocksPlan)
    found, size = paged_blocks(plan), plan.tokens_a_block
    charts.title("Blocks of each answer, by their number in the pool")
    bars = []
    for sequence, table in enumerate(found.tables):
        for place, block in enumerate(table):
            start, end = place * size, min((place + 1) * size, found.tokens)
            users = found.users[block]
            kind = "shared by several" if users > 1 else "its own"
            bars.append(Bar(f"answer {sequence + 1}", start, end, f"{block}", kind, f"block {block}: {users} use it"))
    said = f"{plan.answers} answers of {found.tokens} tokens in blocks of {size}: {found.slots // size} blocks in use"
    charts.lanes(bars, "tokens", "block table", said)
    figures(
        [
            Figure("Blocks in use", f"{found.slots // size}", f"{found.slots} slots"),
            Figure("Slots without a token", f"{found.wasted}", "in the last block of each sequence alone"),
            Figure("Copied on a write", f"{found.copied}", "a shared block is copied before one of its users writes"),
            Figure(
                "Empty if reserved", f"{found.contiguous_wasted}", f"of {found.contiguous_slots} slots without blocks"
            ),
        ]
    )
    st.latex(
        r"\begin{gathered} "
        r"\text{blocks of a sequence} = \lceil t / B \rceil \\ "
        r"\text{wasted} < B \text{ a sequence} "
        r"\end{gathered}"
    )
    st.caption(f"Source: {SOURCE}")
