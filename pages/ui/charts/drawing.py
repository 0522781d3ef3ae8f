"""What all charts share: how one is drawn, its title, its legend, what its axis divides by."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any, Final

import streamlit as st

from calc.units import axis_of_bytes
from pages.ui.numbers import Numbers

RED: Final = "#d0553f"  # reads on light and dark
LINES: Final = (
    "#3b76b8",
    "#d98c1f",
    "#2f9477",
    "#b8568a",
    "#7d9ad6",
    "#9a7b3c",
    "#c8553d",
    "#7b8794",
    "#5aa7c7",
    "#9a6fc4",
)

# the letters that an axis takes for powers of 1000, by unit
_LETTERS: Final = {
    "FLOPs": ("", "k", "M", "G", "T", "P", "E", "Z", "Y"),
    "parameters": ("", "K", "M", "B", "T", "Q"),
    "tokens/s": ("", "k", "M", "B"),
}
_LONG: Final = ((86400, "days"), (3600, "h"))  # what an axis of long times divides seconds by


def draw(data: Any, spec: dict[str, Any], key: str, said: str, **options: Any) -> Any:
    """A chart with text that is dark enough on the theme in use."""
    ink = "#c3ccd7" if st.context.theme.type == "dark" else "#46505c"
    axis = {"labelColor": ink, "titleColor": ink}
    config = {"axis": axis, "axisX": axis, "axisY": axis}
    return st.vega_lite_chart(data, {**spec, "config": config}, key=key, alt=said, **options)


def title(text: str) -> None:
    """The line above a chart."""
    st.markdown(f"**{text}**")


def legend(entries: Iterable[tuple[str, str, str]]) -> None:
    """The names of a chart's colours below it, each with a value where there is one: (name, colour, value)."""
    items = "".join(
        f'<li><span style="background:{colour}"></span>{escape(name)}{f" <b>{escape(value)}</b>" if value else ""}</li>'
        for name, colour, value in entries
    )
    st.html(f'<ul class="legend">{items}</ul>')


def scale_of(unit: str, numbers: Numbers, most: float) -> tuple[int, str]:
    """What an axis divides by, and what it then writes after each number."""
    if unit == "bytes":
        size, name = axis_of_bytes(most, numbers.units == "GiB")
        return size, f" {name}"
    if unit == "seconds":
        return next(((size, f" {name}") for size, name in _LONG if most >= 2 * size), (1, " s"))
    letters = _LETTERS.get(unit, ("",))
    power = next((power for power in range(len(letters) - 1, 0, -1) if most >= 1000**power), 0)
    return 1000**power, f" {letters[power]}{'FLOP' if unit == 'FLOPs' else ''}"
