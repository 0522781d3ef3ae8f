"""The roofline of a machine from measured rows: its data sheet's roofs, the roofs that it reached, and each kernel under them.

Williams, Waterman and Patterson, "Roofline", Communications of the ACM 52(4), 2009: rate = min(peak, bandwidth · intensity).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calc.hardware import gpus
from calc.measurements.imported import machine_of
from calc.units import GB, TB

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Roof:
    """FLOP/s and bytes/s that bound every kernel; `name` says whose figures they are."""

    name: str
    flops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which the two roofs meet."""
        return self.flops / self.bandwidth

    def rate(self, intensity: float) -> float:
        """The most FLOP/s at that intensity."""
        return min(self.flops, self.bandwidth * intensity)


@dataclass(frozen=True, slots=True)
class Point:
    """One kernel: FLOPs a byte by its formulas, FLOP/s as measured (median)."""

    kernel: str
    case: str
    intensity: float
    rate: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """What is known of a machine; no roofs where neither its data sheet nor its own rates are known."""

    machine: str
    roofs: tuple[Roof, ...]
    points: tuple[Point, ...]


def rooflines(rows: Iterable[Row]) -> list[Roofline]:
    """A roofline for each machine that has a kernel in the rows (`Records.rows`, the newest last)."""
    by_machine: dict[str, list[Row]] = {}
    for row in rows:
        by_machine.setdefault(machine_of(row["environment"]), []).append(row)
    found = [Roofline(name, tuple(_roofs(own)), tuple(_points(own))) for name, own in by_machine.items()]
    return [each for each in found if each.points]


def _roofs(rows: Sequence[Row]) -> Iterable[Roof]:
    sheet = gpus().get(str(rows[-1]["environment"].get("catalogue", "")))
    if sheet and (peak := sheet.peak_flops("bf16") or sheet.peak_flops("fp16")) and sheet.memory_bandwidth:
        yield Roof("data sheet, 16 bits", peak, sheet.memory_bandwidth)
    rate, bandwidth = _best(rows, "rate/bf16/"), _best(rows, "bandwidth/copy/")
    if rate and bandwidth:
        yield Roof("reached by bf16 matmul and copy", rate * TB, bandwidth * GB)


def _best(rows: Iterable[Row], quantity: str) -> float:
    return max((row["measured"] or 0.0 for row in rows if row["quantity"].startswith(quantity)), default=0.0)


def _points(rows: Sequence[Row]) -> Iterable[Point]:
    """The newest of each kernel and case whose intensity is known."""
    values = {(row["workload"], row["case"], row["quantity"]): row for row in rows}
    for (workload, case, quantity), row in values.items():
        name = quantity.removeprefix("intensity/")
        if name == quantity:
            continue
        rate = values.get((workload, case, f"rate/{name}"))
        moved = values.get((workload, case, f"bandwidth/{name}"))
        if rate and rate["measured"]:
            yield Point(f"{workload}, {name}", case, row["predicted"], rate["measured"] * TB)
        elif moved and moved["measured"]:
            yield Point(f"{workload}, {name}", case, row["predicted"], moved["measured"] * GB * row["predicted"])
