"""Views of a breakdown: headline figures, a stacked bar, a table, the formula of each leaf, downloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import streamlit as st

from calc.breakdown import Breakdown, Component, Formula, Row
from calc.command_line.tables import answer_json
from calc.commands import Answer
from calc.pipeline import ClosedForm
from calc.serving import ServingAnswer
from calc.training import TrainingAnswer
from calc.training.peak_breakdown import components
from calc.units import show_bytes_decimal, show_count, show_value
from pages.ui.text import plain


@dataclass(frozen=True, slots=True)
class Metric:
    """A headline: what it is, its value ready to read, and what to know about it."""

    label: str
    value: str
    help: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it fits (None: unknown), what, and by how much; and where it fits, what may yet make it not fit."""

    fits: bool | None
    what: str
    why: str
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class Numbers:
    """How numbers are shown: `units` is GiB or GB, for bytes."""

    units: str

    def show(self, value: float | None, unit: str = "bytes") -> str:
        """A value with its unit, for reading; unknown is said."""
        if value is None:
            return "unknown"
        return show_bytes_decimal(value) if unit == "bytes" and self.units == "GB" else show_value(value, unit)

    def room(self, headroom: float | None) -> str:
        """Bytes left over, or missing where they are negative; nothing when unknown."""
        if headroom is None:
            return ""
        return f"short by {self.show(-headroom)}" if headroom < 0 else f"headroom {self.show(headroom)}"

    def count(self, value: float | None, unit: str = "") -> str:
        """A plain number, with a unit after it; from a billion on with a letter, which a card has room for."""
        if value is None:
            return "unknown"
        if value >= 10**9:
            return f"{show_count(value)}{unit}"
        if 0 < value < 0.001:
            return f"< 0.001{unit}"
        return f"{value:,.0f}{unit}" if value >= 1000 else f"{value:.3g}{unit}"

    def exact(self, value: float | None) -> str:
        """A number with all the digits that tell it from a whole one."""
        return "unknown" if value is None else f"{value:,.10g}"

    def percent(self, value: float | None) -> str:
        """A ratio."""
        return "unknown" if value is None else f"{value:.1%}"

    def ratio(self, value: float | None) -> str:
        """How many times."""
        return "unknown" if value is None else f"{value:.3g}×"


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


def headline(figures: Sequence[Metric], in_card: bool = False) -> None:
    """The answer first: a row of figures that wraps where the screen is narrow."""
    with st.container(horizontal=True, gap="small"):
        for each in figures:
            st.metric(each.label, each.value, help=each.help or None, border=not in_card, width=148 if in_card else 166)


def table(breakdown: Breakdown, numbers: Numbers) -> None:
    """Every leaf: its path, its value to read and exact, its share of the whole, how many copies it counts."""
    rows, total = breakdown.rows(), breakdown.total
    frame = pd.DataFrame(
        {
            "Part": [_short(row.path, breakdown) for row in rows],
            "Value": [numbers.show(row.value, breakdown.unit) for row in rows],
            "Share": [row.value / total if total else 0.0 for row in rows],
            f"Exact {breakdown.unit}": [_exact(row.value) for row in rows],
            "Copies": [row.copies for row in rows],
        }
    )
    columns = {
        "Share": st.column_config.ProgressColumn(format="percent", min_value=0, max_value=1, width="small"),
        "Copies": st.column_config.NumberColumn(format="localized", width="small"),
    }
    st.dataframe(frame, hide_index=True, column_config=columns)


def _exact(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.12g}"


def _short(path: str, breakdown: Breakdown) -> str:
    """A path for reading, without the name of the whole."""
    return spaced(path.removeprefix(f"{breakdown.root.name}/"))


def spaced(path: str) -> str:
    """A path or a name for reading."""
    return path.replace("/", " › ").replace("_", " ")


def formulas(breakdown: Breakdown, numbers: Numbers, key: str) -> None:
    """The formula of the leaf that the user picks, in letters and with the user's numbers, with its source."""
    rows = {_short(row.path, breakdown): row for row in breakdown.rows() if row.component.formula}
    with st.expander("Show the formula", icon=":material/function:"):
        if rows:
            row = rows[st.selectbox("Part", list(rows), key=f"{key}formula of")]
            _formula(row, breakdown.unit, numbers)


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
    st.markdown(f"Source: {_source(formula)}")
    for assumption in formula.assumes:
        st.markdown(f"- Assumes: {plain(assumption)}")


def _latex(value: float) -> str:
    return f"{value:,}".replace(",", "{,}") if isinstance(value, int) else f"{value:.6g}"


def _source(formula: Formula) -> str:
    return f"[{plain(formula.source)}]({formula.url})" if formula.url else plain(formula.source)


def closed_forms(forms: Sequence[tuple[ClosedForm, float]]) -> None:
    """What the literature says in closed form, each against its simulated value."""
    if forms:
        with st.expander("Against the closed forms of the literature", icon=":material/menu_book:"):
            for form, simulated in forms:
                applies = "" if form.applies else " (this plan is outside its assumptions: a guide only)"
                st.markdown(
                    f"**{form.quantity.replace('_', ' ')}**: {form.value:.5g} by the formula{applies}, {simulated:.5g} simulated"
                )
                st.latex(f"{form.formula.symbolic()} = {form.formula.with_numbers(form.numbers)}")
                st.caption(f"{_source(form.formula)} · assumes: {plain('; '.join(form.formula.assumes))}")


def downloads(answer: Answer, name: str, key: str) -> None:
    """The answer to take home, with exact numbers: the same bytes that the command line prints."""
    with st.container(horizontal=True):
        st.download_button(
            "CSV",
            answer.breakdown.csv,
            f"{name}.csv",
            "text/csv",
            f"{key}csv",
            on_click="ignore",
            icon=":material/download:",
        )
        st.download_button(
            "JSON",
            lambda: answer_json(answer) + "\n",
            f"{name}.json",
            "application/json",
            f"{key}json",
            on_click="ignore",
            icon=":material/download:",
        )


def calibration(notes: Sequence[str]) -> None:
    """What of the answer was measured, and where."""
    if notes:
        st.caption("".join(f"\n- {plain(note)}" for note in notes))


def remarks(answer: Answer) -> None:
    """What was taken for granted, what was not read, what to know."""
    data = answer.as_json()
    for heading, name in (
        ("Taken for granted", "assumptions"),
        ("Notes", "notes"),
        ("Not read in the config", "unread"),
    ):
        lines = data.get(name) or []
        if lines:
            st.caption(f"**{heading}**\n" + "".join(f"\n- {plain(line)}" for line in lines))


def parts(breakdown: Breakdown, most: int = 9) -> list[tuple[str, float]]:
    """A few parts that make the whole, for a chart: the largest are opened until there are `most` of them."""
    found: list[tuple[str, Component, int]] = [("", breakdown.root, 1)]
    while True:
        opened = [each for each in found if each[1].children and len(found) + len(each[1].children) - 1 <= most]
        if not opened:
            break
        path, part, copies = max(opened, key=lambda each: each[1].total * each[2])
        at = found.index((path, part, copies))
        prefix = f"{path}/" if path else ""
        found[at : at + 1] = [(prefix + child.name, child, copies * part.count) for child in part.children]
    return [(spaced(path), part.total * copies) for path, part, copies in found if part.total]


def values_at(breakdown: Breakdown, paths: Sequence[str]) -> list[tuple[str, float]]:
    """What a breakdown of the same shape has in the parts that `parts` found in another."""
    rows = [(_short(row.path, breakdown), row.value) for row in breakdown.rows()]
    below = spaced("/")
    return [(at, sum(value for path, value in rows if path == at or path.startswith(at + below))) for at in paths]


def parts_below(breakdown: Breakdown) -> list[tuple[str, float]]:
    """The parts right below the whole."""
    return [(spaced(part.name), part.total) for part in breakdown.root.children]


def need(answer: ServingAnswer, numbers: Numbers) -> str:
    """What serving needs on the GPU with the least room, of what it may take."""
    room, plan = answer.capacity, answer.plan
    if room.limit is None:
        return f"needs {numbers.show(answer.breakdown.total)} per GPU"
    of = f"{numbers.show(room.needed)} of {numbers.show(room.limit)}"
    if plan.kv_memory_gib:
        return f"the cache needs {of} given to it"
    assert answer.gpu
    assert answer.gpu.memory_bytes
    return f"needs {of} per GPU ({numbers.percent(room.limit / answer.gpu.memory_bytes)} of its memory)"


def too_heavy(answer: ServingAnswer, numbers: Numbers) -> str:
    """Where the weights alone are more than the GPU has; nothing where they are not."""
    weights, memory = answer.weights_bytes, answer.gpu.memory_bytes if answer.gpu else None
    if memory is None or weights <= memory:
        return ""
    return f"the weights alone take {numbers.show(weights)} of {numbers.show(memory)}"


def in_blocks(answer: ServingAnswer, numbers: Numbers) -> str:
    """How the tokens that fit lie in the cache's blocks."""
    room, context = answer.capacity, f"{answer.plan.context:,} tokens"
    if room.blocks is None:
        return f"Sequences of {context} that fill the room to its last byte; no blocks are counted"
    if room.request_blocks:
        return f"Sequences of {context}; each takes {room.request_blocks:,} of the pool's {room.blocks:,} blocks"
    block = answer.plan.block_size
    return f"To the last byte of the room. Its {room.blocks:,} whole blocks of {block:,} tokens hold {room.blocks * block:,}"


_OVERHEAD = {"context": "CUDA context", "nccl": "NCCL", "workspace": "workspace", "fragmentation": "fragmentation"}


def held_by_stage(answer: TrainingAnswer, most: int = 16) -> dict[str, list[tuple[str, float]]]:
    """What one device of each stage holds at its highest point, with its CUDA and framework overhead; the first `most` stages."""
    rows = {}
    for memory in answer.stages[:most]:
        tensors = [(spaced(part.name), part.total) for part in components(memory)]
        overhead = answer.totals_of(memory).overhead._asdict()
        rows[f"stage {memory.stage.rank}"] = tensors + [
            (_OVERHEAD[name], value) for name, value in overhead.items() if value
        ]
    return rows
