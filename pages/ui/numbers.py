"""How numbers are shown, and the figures that stand above a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from calc.units import show_bytes_decimal, show_count, show_value


@dataclass(frozen=True, slots=True)
class Figure:
    """What it is, its value ready to read, what to know about it, and the value itself with its unit for comparisons and curves."""

    label: str
    value: str
    help: str = ""
    amount: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Numbers:
    """How numbers are shown: `units` is GiB or GB, for bytes."""

    units: str

    def show(self, value: float | None, unit: str = "bytes") -> str:
        """A value with its unit, for reading; unknown is said."""
        if value is None:
            return "unknown"
        return show_bytes_decimal(value) if unit == "bytes" and self.units == "GB" else show_value(value, unit)

    def bytes(self, label: str, value: float | None, help: str = "") -> Figure:
        """A figure in bytes."""
        exact = f"{value:,} bytes. " if isinstance(value, int) else ""
        return Figure(label, self.show(value), exact + help, value, "bytes")

    def headroom(self, value: float | None) -> str:
        """Bytes left over, or missing where they are negative; nothing when unknown."""
        if value is None:
            return ""
        return f"short by {self.show(-value)}" if value < 0 else f"headroom {self.show(value)}"

    def count(self, value: float | None, unit: str = "") -> str:
        """A plain number, with a unit after it; from a billion on with a letter."""
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


def figures(found: Sequence[Figure], key: str = "figures") -> None:
    """A row of figures that wraps where the screen is narrow."""
    with st.container(horizontal=True, gap="small", key=f"row of {key} {found[0].label}"):
        for each in found:
            st.metric(each.label, each.value, help=each.help or None, border=True)
