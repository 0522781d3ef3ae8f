"""Serving speed against 600 end-to-end measurements on real GPUs, next to what others predict for the same rows.

    python -m tests.published.serving_speed [ROWS.json] [--defaults]

prints the median and the 90th percentile of the relative error of TPOT and TTFT by engine, model and GPU: ours, aiconfigurator's and
the ideal roofline's. ROWS.json is a list of rows as aiconfigurator's silicon_sample.csv was handed on (left out: the rows kept here).
`--defaults` leaves out what the runs' own scripts set (`serving_recipes`).
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from calc.catalogue import load
from calc.errors import InputError
from calc.hardware import gpu
from calc.model.spec import ModelSpec
from calc.serving import ServingPlan, serve
from tests.published.serving_recipes import recipe

KEPT = Path(__file__).with_suffix(".json")
Row = dict[str, Any]

_ENGINES = {"trtllm": "tensorrt-llm"}
_MODELS = {"kimi-k2.5": "kimi-k2-instruct", ("qwen3-32b", "fp8"): "qwen3-32b-fp8-static-pertensor"}
_WEIGHTS = {"fp8": "fp8", "fp4": "nvfp4", "bf16": "bf16", "int4": "awq-int4"}


class Errors(NamedTuple):
    """Predicted over measured, less one, of one row: time to the first token and per token."""

    row: Row
    ttft: float
    tpot: float
    roofline_ttft: float
    roofline_tpot: float


def rows(path: Path = KEPT) -> list[Row]:
    """The rows, from the compact form kept here or from a list of them."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, dict):
        return [dict(zip(data["columns"], values, strict=True)) for values in data["rows"]]
    return [flat(row) for row in data]


def flat(row: Row) -> Row:
    """A row as it was handed on, with its source and aiconfigurator's prediction as columns."""
    line, _, rest = row["source"].partition("line ")[2].partition(" (")
    dump, _, day = rest.rstrip(")").partition(", measured ")
    theirs = row["aiconfigurator"] or {}
    kept = {key: value for key, value in row.items() if key not in ("source", "aiconfigurator", "id")}
    return {
        "line": int(line),
        "dump": dump,
        "day": day,
        **kept,
        "theirs_ttft_ms": theirs.get("ttft_ms"),
        "theirs_tpot_ms": theirs.get("tpot_ms"),
    }


def plan_of(row: Row, *, recipes: bool = True) -> ServingPlan:
    """The row as a serving plan. The cache is in 8 bits where the weights are quantised, as the runs' scripts set it, but for gpt-oss
    on Hopper and Kimi, whose scripts leave it in 16."""
    model, precision = row["model"], row["precision"]
    wide = (
        precision == "bf16" or (model.startswith("gpt-oss") and row["gpu"].startswith("h")) or model.startswith("kimi")
    )
    return ServingPlan(
        engine=_ENGINES.get(row["engine"], row["engine"]),
        engine_version=_vllm_version(row),
        tp=row["tp"],
        ep=row["ep"],
        dp=row["dp"],
        weights="mxfp4" if model.startswith("gpt-oss") else _WEIGHTS[precision],
        kv_dtype="bf16" if wide else "fp8",
        prompt=row["isl"],
        output=row["osl"],
        context=row["isl"] + row["osl"],
        concurrency=row["concurrency"],
        **(recipe(row) if recipes else {}),
    )


def _vllm_version(row: Row) -> str | None:
    """The version of a release of vLLM; None where the row names none, or a build between two."""
    named = row["engine"] == "vllm" and (row["engine_version"] or "")[:1].isdigit()
    return row["engine_version"] if named else None


@cache
def _spec(model: str, precision: str) -> ModelSpec:
    return load(_MODELS.get((model, precision)) or _MODELS.get(model) or model)


def errors(chosen: Iterable[Row], *, recipes: bool = True) -> Iterator[Errors]:
    """The errors of each row; a row that is refused is left out, with the reason on standard error."""
    for row in chosen:
        try:
            found = serve(_spec(row["model"], row["precision"]), plan_of(row, recipes=recipes), gpu(row["gpu"])).speed
        except InputError as error:
            print(f"line {row['line']}: {error}", file=sys.stderr)
            continue
        assert found.ideal
        first, each = row["ttft_ms"] / 1e3, row["tpot_ms"] / 1e3
        pairs = (found.ttft_s, first), (found.tpot_s, each), (found.ideal.ttft_s, first), (found.ideal.tpot_s, each)
        yield Errors(row, *(predicted / measured - 1 for predicted, measured in pairs if predicted is not None))


def spread(values: Iterable[float]) -> str:
    """Median and 90th percentile of the absolute values, and the median with its sign, in per cent."""
    found = list(values)
    if not found:
        return "-"
    sizes = sorted(abs(value) for value in found)
    at = [100 * sizes[min(len(sizes) - 1, int(share * len(sizes)))] for share in (0.5, 0.9)]
    return f"{at[0]:.0f} / {at[1]:.0f} ({100 * sorted(found)[len(found) // 2]:+.0f})"


_COLUMNS: tuple[tuple[str, Callable[[Errors], float | None]], ...] = (
    ("TPOT", lambda each: each.tpot),
    ("aiconfigurator", lambda each: _theirs(each.row, "tpot_ms")),
    ("roofline", lambda each: each.roofline_tpot),
    ("TTFT", lambda each: each.ttft),
    ("aiconfigurator", lambda each: _theirs(each.row, "ttft_ms")),
    ("roofline", lambda each: each.roofline_ttft),
)


def _theirs(row: Row, what: str) -> float | None:
    predicted = row[f"theirs_{what}"]
    return None if predicted is None else predicted / row[what] - 1


def report(found: list[Errors]) -> str:
    """The table: all rows, then by engine, and by engine, model, GPU and precision. Per cent: median / 90th percentile (signed median)."""
    lines = [f"{'':<52}{'rows':>5}  " + "".join(f"{name:<22}" for name, _ in _COLUMNS)]
    keys: tuple[tuple[str, ...], ...] = ((), ("engine",), ("engine", "model", "gpu", "precision"))
    for key in keys:
        groups: dict[str, list[Errors]] = defaultdict(list)
        for each in found:
            groups[" ".join(str(each.row[name]) for name in key) or "all"].append(each)
        for name in sorted(groups):
            cells = (spread(value for each in groups[name] if (value := get(each)) is not None) for _, get in _COLUMNS)
            lines.append(f"{name:<52}{len(groups[name]):>5}  " + "".join(f"{cell:<22}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    print(report(list(errors(rows(Path(words[0])) if words else rows(), recipes="--defaults" not in sys.argv))))
