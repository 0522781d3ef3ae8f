"""Answers and rows as text: aligned tables, JSON, CSV, Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calc.commands import Answer
from calc.errors import InputError
from calc.units import show_value
from calc.version import VERSION


def answer_json(answer: Answer) -> str:
    """The answer's JSON, and the version of Plumbline that gave it. InputError where a number in it is none that JSON has."""
    try:
        return json.dumps({"version": VERSION, **answer.as_json()}, indent=1, allow_nan=False)
    except ValueError:
        raise InputError(
            "answer: a number in it is beyond 1.8e308, the largest there is; give smaller values"
        ) from None


def formatted(answer: Answer, form: str) -> str:
    """The answer as a table, JSON, CSV or Markdown."""
    if form == "json":
        return answer_json(answer)
    if form == "csv":
        return answer.breakdown.csv().rstrip("\n")
    data = answer.as_json()
    unit = answer.breakdown.unit
    summary = list(_summary(data, unit))
    parts = [(row.path, f"{row.value:,}", show_value(row.value, unit)) for row in answer.breakdown.rows()]
    header, stored, reasons = _stored(data.get("stored"))
    fixes = [_fix(row) for row in data.get("fixes", ())]
    named, layouts = _records(data.get("layouts", ()))
    remarks = [
        f"{key}: {text}"
        for key in ("calibration", "assumptions", "notes", "unread", "startup_lines")
        for text in data.get(key, ())
    ]
    if form == "markdown":
        tables = [markdown(("quantity", "value"), summary)]
        tables += [markdown(named, layouts)] if layouts else []
        tables += [markdown(("path", unit, ""), parts)]
        tables += [markdown(_FIXES, fixes)] if fixes else []
        tables += [markdown(header, stored)] if stored else []
        return "\n\n".join([*tables, "\n".join(f"- {remark}" for remark in reasons + remarks)]).rstrip()
    tables = [
        aligned(summary),
        aligned(layouts, named) if layouts else "",
        aligned(fixes, _FIXES) if fixes else "",
        aligned(parts),
        aligned(stored, header) if stored else "",
        "\n".join(reasons),
    ]
    return "\n\n".join(filter(None, [*tables, "\n".join(remarks)]))


_OFFLOADED = ("host_bytes", "nvme_bytes", "transfer_bytes", "transfer_seconds", "nvme_seconds")


def _summary(data: Mapping[str, Any], unit: str) -> Iterator[tuple[str, str]]:
    """An answer's figures, with those of its small groups (phases, overhead_bytes) below their group's name."""
    left_out = () if data.get("host_bytes") or data.get("nvme_bytes") else _OFFLOADED
    for key, value in data.items():
        if key in left_out:
            continue
        if _is_scalar(value):
            yield key, _cell(key, value)
        elif isinstance(value, Mapping) and all(isinstance(figure, int) for figure in value.values()):
            ending = "_bytes" if unit == "bytes" else ""
            yield from ((f"{key}/{name}", _cell(name + ending, figure)) for name, figure in value.items())


def _stored(stored: Mapping[str, Any] | None) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """What a checkpoint stores by group and by format as a table, and why that is not the count above."""
    header = ("stored", "elements", "bytes", "")
    if not stored:
        return header, [], []
    total = {"total": {key: stored[key] for key in ("elements", "bytes")}}
    rows: list[tuple[str, ...]] = [
        (name, f"{row['elements']:,}", f"{row['bytes']:,}", show_value(row["bytes"], "bytes"))
        for sums in (stored["by_group"], stored["by_dtype"], total)
        for name, row in sums.items()
    ]
    known = stored["difference"] is not None
    reasons = [f"stored minus the model's count: {stored['difference']:+,}"] if known else []
    return header, rows, [*reasons, *(f"  {reason}" for reason in stored["reasons"])]


_FIXES = ("what would make it fit", "needs", "saves", "cost")


def _fix(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A change that makes a step fit, as a row of a table."""
    costs = [f"{cost['ratio']:.3g}x {cost['quantity']}" if cost["ratio"] else cost["text"] for cost in row["costs"]]
    needs, saves = (show_value(row[key], "bytes") for key in ("driver_bytes", "saved_bytes"))
    return row["flags"], needs, saves, "; ".join(costs)


def _records(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Records of equal keys as the header and rows of a table."""
    if not rows:
        return (), []
    return tuple(rows[0]), [tuple(_short(key, value) for key, value in row.items()) for row in rows]


def _short(key: str, value: object) -> str:
    """A value with its unit, for reading alone."""
    unit = _unit(key)
    return show_value(value, unit) if unit and isinstance(value, int | float) else _cell("", value)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


_UNITS = (("_bytes", "bytes"), ("bytes_per_token", "bytes"), ("bytes_per_sequence", "bytes"), ("seconds", "seconds"))


def _unit(key: str) -> str:
    """The unit that a key's name tells."""
    counted = "FLOPs" if "flops" in key and "tflops" not in key else ""
    return next((unit for ending, unit in _UNITS if key.endswith(ending)), counted)


def _cell(key: str, value: object) -> str:
    """A value with its unit for reading, and exact where the two differ."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    unit = _unit(key)
    if unit and isinstance(value, int | float):
        shown = show_value(value, unit)
        return f"{shown} ({value:,})" if isinstance(value, int) and abs(value) > 1023 else shown
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def aligned(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Aligned columns: numbers to the right, text to the left."""
    table = [header, *rows] if header else rows
    if not table:
        return ""
    columns = list(zip(*table, strict=True))
    right = [
        all(cell[:1].isdigit() or cell in ("", "unknown") for cell in column[bool(header) :]) for column in columns
    ]
    widths = [max(map(len, column)) for column in columns]
    lines = (
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(row, widths, right, strict=True)
        )
        for row in table
    )
    return "\n".join(line.rstrip() for line in lines)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
