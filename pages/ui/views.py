"""Views of an answer: the verdict, the table of its parts, the formula of each, what it assumes, downloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from calc.breakdown import Breakdown, Formula, Row
from calc.command_line.tables import answer_json
from calc.commands import Answer
from calc.pipeline import ClosedForm
from pages.ui.numbers import Numbers
from pages.ui.text import plain


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it fits (None: unknown), what, and by how much; and where it fits, what may yet make it not fit."""

    fits: bool | None
    what: str
    why: str
    doubt: str = ""


_SAID = {
    True: (st.success, "fits"),
    False: (st.error, "does not fit"),
    None: (st.info, "may or may not fit, the GPU's memory being unknown"),
}


def verdict(found: Verdict) -> None:
    """Fits or does not, in one line."""
    box, said = _SAID[found.fits]
    if found.fits and found.doubt:
        box, said = st.warning, f"{said}, {found.doubt}"
    box(f"**{found.what} {said}**: {found.why}")


def table(breakdown: Breakdown, numbers: Numbers) -> None:
    """Every leaf: its path, its value to read and exact, its share of the whole, how many copies it counts."""
    rows, total = breakdown.rows(), breakdown.total
    frame = {
        "Part": [_short(row.path, breakdown) for row in rows],
        "Value": [numbers.show(row.value, breakdown.unit) for row in rows],
        "Share": [row.value / total if total else 0.0 for row in rows],
        f"Exact {breakdown.unit}": [_exact(row.value) for row in rows],
        "Copies": [row.copies for row in rows],
    }
    columns = {
        "Share": st.column_config.ProgressColumn(format="percent", min_value=0, max_value=1, width="small"),
        "Copies": st.column_config.NumberColumn(format="localized", width="small"),
    }
    st.dataframe(
        frame, hide_index=True, column_config=columns, alt="Every part with its value and its share of the whole"
    )


def _exact(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.12g}"


def _short(path: str, breakdown: Breakdown) -> str:
    """A path for reading, without the name of the whole."""
    return breakdown.label(path.removeprefix(f"{breakdown.root.name}/"))


def formulas(breakdown: Breakdown, numbers: Numbers) -> None:
    """The formula of the leaf that the user picks, in letters and with the user's numbers, with its source."""
    rows = {_short(row.path, breakdown): row for row in breakdown.rows() if row.component.formula}
    if not rows:
        st.info("No part of this answer has a formula.")
        return
    largest = max(rows, key=lambda path: rows[path].value)
    chosen = st.selectbox("Part", list(rows), index=list(rows).index(largest), key="formula of")
    _formula(rows.get(chosen, rows[largest]), breakdown.unit, numbers)


def _formula(row: Row, unit: str, numbers: Numbers) -> None:
    formula, part = row.component.formula, row.component
    assert formula is not None
    one = f"{_exact(part.value)} {unit}"
    st.latex(formula.symbolic())
    st.latex(f"{formula.with_numbers(part.numbers)} = {_latex(part.value)}")
    if row.copies > 1:
        st.markdown(
            f"{plain(one)} each, {row.copies:,} copies: **{_exact(row.value)} {unit}** ({numbers.show(row.value, unit)})"
        )
    else:
        st.markdown(f"**{_exact(row.value)} {unit}** ({numbers.show(row.value, unit)})")
    st.markdown(f"Source: {source(formula)}")
    for assumption in formula.assumes:
        st.markdown(f"- Assumes: {plain(assumption)}")


def _latex(value: float) -> str:
    return f"{value:,}".replace(",", "{,}") if isinstance(value, int) else f"{value:.6g}"


def source(formula: Formula) -> str:
    """A formula's source, as a link where it has an address."""
    return f"[{plain(formula.source)}]({formula.url})" if formula.url else plain(formula.source)


def closed_forms(forms: Sequence[tuple[ClosedForm, float]]) -> None:
    """What the literature says in closed form, with each one's simulated value."""
    for form, simulated in forms:
        applies = "" if form.applies else " (this plan is outside its assumptions: a guide only)"
        st.markdown(
            f"**{form.quantity.replace('_', ' ')}**: {form.value:.5g} by the formula{applies}, {simulated:.5g} simulated"
        )
        st.latex(f"{form.formula.symbolic()} = {form.formula.with_numbers(form.numbers)}")
        st.caption(f"{source(form.formula)} · assumes: {plain('; '.join(form.formula.assumes))}")


def downloads(answer: Answer, name: str) -> None:
    """The answer to take home, with exact numbers: the same bytes that the command line prints."""
    st.download_button(
        "CSV", answer.breakdown.csv, f"{name}.csv", "text/csv", on_click="ignore", icon=":material/download:"
    )
    st.download_button(
        "JSON",
        lambda: answer_json(answer) + "\n",
        f"{name}.json",
        "application/json",
        on_click="ignore",
        icon=":material/download:",
    )


def calibration(notes: Sequence[str]) -> None:
    """What of the answer was measured, and where."""
    if notes:
        st.caption("".join(f"\n- {plain(note)}" for note in notes))


def remarks(answer: Answer) -> None:
    """What is assumed, what to know, what of the config was not read."""
    data = answer.as_json()
    headings = (("Assumptions", "assumptions"), ("Notes", "notes"), ("Not read in the config", "unread"))
    said = False
    for heading, name in headings:
        lines = data.get(name) or []
        if lines:
            said = True
            st.markdown(f"**{heading}**\n" + "".join(f"\n- {plain(line)}" for line in lines))
    if not said:
        st.markdown("Nothing is assumed that the scenario does not say.")
