"""What was measured on a GPU, put in place of what is assumed: efficiencies, overheads and residuals, each with where it came from.

Each figure is a point (the median over runs) and a bound: the careful end, the lowest efficiency or the highest overhead seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel

from calc.breakdown import Breakdown
from calc.commands import Answer
from calc.errors import InputError
from calc.hardware import Gpu
from calc.measurements.imported import machine_of
from calc.measurements.records import Records
from calc.units import MiB

At = Literal["off", "point", "bound"]
Row = Mapping[str, Any]
Plan = TypeVar("Plan", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure, under the name of the plan's field that it fills. `source` says what measured it, where and when."""

    name: str
    point: float
    bound: float
    source: str

    def at(self, at: At) -> float:
        return self.point if at == "point" else self.bound


@dataclass(frozen=True, slots=True)
class Calibration:
    """The figures of one GPU; none when nothing was measured on it."""

    gpu: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class _Rule:
    """Which rows give a figure, and what each row says: the typical value, and its careful end.

    Of one run the best row counts (`best`), since a roof is what the best shape reaches, or the worst where all must be held.
    """

    name: str
    workload: str
    quantities: tuple[str, ...]  # how a row's quantity begins
    value: Callable[[Row], tuple[float, float]]
    best: bool
    careful: Callable[[Iterable[float]], float]


def _share(row: Row) -> tuple[float, float]:
    """Of the data sheet's figure: the median, and the 20th percentile."""
    low = row["measured"] if row["p20"] is None else row["p20"]
    return min(1.0, row["measured"] / row["predicted"]), min(1.0, low / row["predicted"])


def _itself(row: Row) -> tuple[float, float]:
    low = row["measured"] if row["p20"] is None else row["p20"]
    return row["measured"], low


def _mib(row: Row) -> tuple[float, float]:
    return row["measured"] / MiB, row["measured"] / MiB


def _percent(row: Row) -> tuple[float, float]:
    return 100 * row["measured"], 100 * row["measured"]


def _beyond(row: Row) -> tuple[float, float]:
    """Allocated minus predicted, in percent of what was predicted."""
    residual = 100 * (row["measured"] - row["predicted"]) / row["predicted"]
    return residual, residual


_PEAKS: Final = ("peak/forward", "peak/backward", "peak/step")
_RULES: Final = (
    _Rule("compute_efficiency", "matmul-rate", ("rate/bf16/",), _share, True, min),
    _Rule("bandwidth_efficiency", "memory-bandwidth", ("bandwidth/copy/",), _share, True, min),
    _Rule("mfu", "flops", ("MFU of the data sheet's peak",), _itself, True, min),
    _Rule("context_mib", "context-and-workspace", ("context",), _mib, False, max),
    _Rule("workspace_mib", "context-and-workspace", ("workspace",), _mib, False, max),
    _Rule("fragmentation", "context-and-workspace", ("fragmentation over peak",), _percent, False, max),
    _Rule("residual", "saved-activations", _PEAKS, _beyond, False, max),
)


def calibration(rows: Iterable[Row], gpu: str) -> Calibration:
    """The figures that rows of `Records.rows` give for a GPU of the catalogue; rows of other devices are passed over.

    `fragmentation_percent` is what is reserved beyond the predicted peak: reserved minus allocated, and allocated minus predicted.
    """
    own = [
        row for row in rows if row["environment"].get("catalogue") == gpu and row["environment"].get("kind") != "cpu"
    ]
    found = {rule.name: figure for rule in _RULES if (figure := _figure(rule, own))}
    beyond = [found.pop(name) for name in ("fragmentation", "residual") if name in found]
    if beyond:
        point, bound = sum(each.point for each in beyond), sum(each.bound for each in beyond)
        source = " and ".join(each.source for each in beyond)
        found["fragmentation_percent"] = Figure("fragmentation_percent", max(0.0, point), max(0.0, bound), source)
    return Calibration(gpu, tuple(found.values()))


def _figure(rule: _Rule, rows: Sequence[Row]) -> Figure | None:
    """The rule's figure over all runs; None when no run has a row for it."""
    runs: dict[str, list[tuple[float, float]]] = {}
    last: Row | None = None
    for row in rows:
        fits = row["workload"] == rule.workload and row["quantity"].startswith(rule.quantities)
        if fits and row["measured"] is not None and _usable(rule, row):
            runs.setdefault(row["run"], []).append(rule.value(row))
            last = row
    if last is None:
        return None
    each = [max(values) if rule.best else _worst(rule, values) for values in runs.values()]
    return Figure(
        rule.name,
        median(point for point, _ in each),
        rule.careful(bound for _, bound in each),
        _source(last, len(each)),
    )


def _usable(rule: _Rule, row: Row) -> bool:
    return bool(row["predicted"]) or rule.value not in (_share, _beyond)


def _worst(rule: _Rule, values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """What is typical of a run's rows, and their careful end."""
    return median(point for point, _ in values), rule.careful(bound for _, bound in values)


def _source(row: Row, runs: int) -> str:
    times = "one run" if runs == 1 else f"{runs} runs"
    return f"{row['workload']} on {machine_of(row['environment'])}, {times}, the last of {row['started'][:10]}"


def of_records(gpu: Gpu | None, records: Records | None = None) -> Calibration:
    """The calibration that this user's store gives for a GPU. InputError without a GPU, or when the store cannot be read."""
    if gpu is None:
        raise InputError("calibrated: it needs a GPU (--gpu) whose measurements to use", "calibrated")
    return calibration((records or Records()).rows(), gpu.name)


def calibrated(plan: Plan, found: Calibration, at: At) -> tuple[Plan, tuple[str, ...]]:
    """The plan with measured figures in the fields that are left at their default, and a line for each that says where it is from."""
    if at == "off":
        return plan, ()
    fields = {name: field for name, field in type(plan).model_fields.items() if getattr(plan, name) == field.default}
    used = [figure for figure in found.figures if figure.name in fields]
    if not used:
        return plan, (f"calibrated: nothing that was measured on {found.gpu} is here, so nothing is changed",)
    values = {name: getattr(plan, name) for name in type(plan).model_fields}
    filled = type(plan).model_validate(values | {figure.name: figure.at(at) for figure in used})
    return filled, tuple(_line(figure, at) for figure in used)


def _line(figure: Figure, at: At) -> str:
    ends = f"median {figure.point:.4g}, careful end {figure.bound:.4g}"
    return f"calibrated: {figure.name} is {figure.at(at):.4g} ({ends}), measured by {figure.source}"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """An answer with the lines that say what of it was measured."""

    answer: Answer
    notes: tuple[str, ...]

    @property
    def breakdown(self) -> Breakdown:
        return self.answer.breakdown

    def as_json(self) -> dict[str, Any]:
        return {**self.answer.as_json(), "calibration": list(self.notes)}
