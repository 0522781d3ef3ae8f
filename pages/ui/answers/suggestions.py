"""What helps to go on from a training answer: changes that make it fit, ready to apply, how far it goes, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from calc.breakdown import Formula, Number
from calc.training import Suggested, TrainingAnswer, TrainingPlan, suggest
from calc.training.advice.checkpoint import DISK
from calc.training.advice.costs import Cost
from calc.training.advice.fit import Change, changes_that_fit, single_changes
from pages.ui import charts, views, widgets
from pages.ui.fields import fields_of
from pages.ui.numbers import Figure, Numbers, figures
from pages.ui.scenario import Scenario
from pages.ui.text import plain

_FIRST = 4  # changes in sight; the others fold away
_WORTH = 0.01  # of what the step needs: a change that saves less is left out


def changes(answer: TrainingAnswer, numbers: Numbers, _: Scenario) -> None:
    """What would make it fit, those on the same GPUs first; where it fits, what each change would save: those that leave the
    training as it is first, the largest saving first."""
    if answer.fits is False:
        found = changes_that_fit(answer.spec, answer.plan, answer.gpu)
        if found:
            charts.title("Each of these makes it fit")
        else:
            st.info("No change of this plan that is known here makes it fit: try a larger GPU or a smaller model.")
    else:
        least = _WORTH * answer.driver_bytes
        found = tuple(sorted(
            (change for change in single_changes(answer) if change.saved_bytes >= least),
            key=lambda change: (not change.same_training, -change.saved_bytes),
        ))  # fmt: skip
        charts.title("What each change would save" if found else "No change on the same GPUs saves a hundredth of it.")
    for index, change in enumerate(found[:_FIRST]):
        _change(change, numbers, f"apply {index}")
    if found[_FIRST:]:
        with st.expander("Other ways", icon=":material/add:"):
            for index, change in enumerate(found[_FIRST:], _FIRST):
                _change(change, numbers, f"apply {index}")


def limits(answer: TrainingAnswer, numbers: Numbers, _: Scenario) -> None:
    """The largest values that fit and a checkpoint's bytes, with the formulas of these and of the changes' costs."""
    found = suggest(answer)
    figures(_figures(found, numbers), "limits")
    _formulas(found)


def _change(change: Change, numbers: Numbers, button: str) -> None:
    """One change in a box: what, what it saves and costs, and a button that sets the widgets to it."""
    needs, saves = numbers.show(change.driver_bytes), numbers.show(change.saved_bytes)
    name = change.name[:1].upper() + change.name[1:]
    fields = fields_of(TrainingPlan)
    values = {fields[field].key: value for field, value in change.values.items()}
    with st.container(border=True, horizontal=True, vertical_alignment="center", gap="small"):
        with st.container(width="stretch", gap=None):
            st.markdown(f"**{plain(name)}**: needs {needs}, saves {saves}")
            st.caption("  \n".join(_cost(cost) for cost in change.costs))
        st.button("Apply", key=button, on_click=widgets.put, args=(values,), icon=":material/check:")


def _cost(cost: Cost) -> str:
    if cost.ratio is None:
        return plain(f"Cost: {cost.text}")
    return plain(f"Cost: {cost.ratio:.3g}× {cost.quantity}; {cost.text}")


def _figures(found: Suggested, numbers: Numbers) -> list[Figure]:
    saved, longest = found.checkpoint, found.answer.spec.max_position_embeddings
    beyond = f" The model itself has {longest:,} positions." if 0 < longest < (found.largest_seq or 0) else ""
    return [
        Figure(
            "Max micro-batch",
            _largest(found.largest_micro_batch),
            "Sequences in one micro-batch with which the step fits, all else as it is",
        ),
        Figure(
            "Max sequence",
            _largest(found.largest_seq),
            f"Tokens with which the step fits, all else as it is.{beyond}",
        ),
        Figure(
            "Saved weights",
            numbers.show(saved.weights_bytes),
            f"{saved.weights_bytes:,} bytes on disk of a checkpoint of the weights alone, or of the adapters that LoRA trains",
        ),
        Figure(
            "Saved to resume",
            numbers.show(saved.bytes),
            f"{saved.bytes:,} bytes on disk of a checkpoint to go on from: weights, master weights and optimizer state",
        ),
        Figure(
            "Host memory to resume",
            numbers.show(saved.host_bytes),
            f"{saved.host_bytes:,} bytes of one node while it resumes: {saved.processes} processes that each load "
            f"{'all of it' if saved.shard_bytes is None else 'their own shards'}",
        ),
    ]


def _largest(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}" if value else "none"


def _formulas(found: Suggested) -> None:
    """Every formula behind the costs and the checkpoint, in letters and with numbers, with its source."""
    saved = found.checkpoint
    rows: dict[str, tuple[Formula, Mapping[str, Number], str]] = {
        "Saved to resume": (DISK, saved.numbers, f"{saved.bytes:,}"),
        "Host memory to resume": (saved.host_formula, saved.numbers, f"{saved.host_bytes:,}"),
    }
    for change in found.fixes:
        for cost in change.costs:
            if cost.formula and cost.ratio is not None:
                rows[f"{change.name}: {cost.quantity}"] = (cost.formula, cost.numbers, f"{cost.ratio:.4g}")
    with st.expander("Where these costs and bytes come from", icon=":material/function:"):
        formula, given, value = rows[st.selectbox("Figure", list(rows), key="source of")]
        st.latex(formula.symbolic())
        st.latex(f"{formula.with_numbers(given)} = {value.replace(',', '{,}')}")
        st.markdown(f"**{value}**")
        st.markdown(f"Source: {views.source(formula)}")
        st.markdown("".join(f"- Assumes: {plain(each)}\n" for each in formula.assumes))
