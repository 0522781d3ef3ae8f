"""Predictions of the measured runs of training_memory.json: `python -m tests.published.training_memory` records them anew."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from calc.catalogue import load_config
from calc.hardware import gpu
from calc.model.config import from_config
from calc.training import TrainingAnswer, TrainingPlan, train
from calc.units import GiB, MiB
from tests.published import test_liger_ops as liger_ops

HERE = Path(__file__).parent
FILE = HERE / "training_memory.json"
FACTS = json.loads(FILE.read_text(encoding="utf-8"))
ROWS, CONFIGS = FACTS["rows"], FACTS["configs"]
UNITS = {"bytes": 1, "MiB": MiB, "GiB": GiB, "GB": 10**9}

PREDICTED = [row for row in ROWS if "plan" in row or "operator" in row]
PREDICTED = [row for row in PREDICTED if row["measured"] and "held_out" not in row]
HELD_OUT = [row for row in ROWS if "held_out" in row]  # looked at when the prediction stood


@cache
def spec_of(name: str):
    """A catalogue's model, one of the file's own configs, or a catalogue's model with some fields changed."""
    given = CONFIGS.get(name, {"catalogue": name})
    base = load_config(given["catalogue"]) if "catalogue" in given else {}
    return from_config(base | {key: value for key, value in given.items() if key != "catalogue"}, name)


def answer_of(row: dict[str, Any]) -> TrainingAnswer:
    """`gpu_memory_gib`: what the driver shows where it is not the catalogue's (H100 of 96 GB in torchtitan's logs)."""
    device = gpu(row["gpu"])
    if "gpu_memory_gib" in row:
        device = replace(device, memory_bytes=int(row["gpu_memory_gib"] * GiB))
    return train(spec_of(row["model"]), TrainingPlan(**row["plan"]), device)


def predicted(row: dict[str, Any]) -> int:
    """The bytes of the counter that was measured, on the rank that measured it: the last, or the one that holds most.

    `allocated` holds the workspaces of matmuls, which the allocator gives; `steady` is what stays between two steps; `driver` is what
    nvidia-smi shows.
    """
    if "operator" in row:
        return operator_bytes(**row["operator"])
    answer = answer_of(row)
    memory = answer.stages[-1] if row.get("rank") == "last" else answer.worst
    workspace = answer.totals_of(memory).overhead.workspace
    if row["counter"] == "steady_allocated":
        fused = row.get("accumulation_fusion", False)  # without it Transformer Engine has no placeholders to keep
        return sum(memory.states) + workspace + int(fused * sum(part.leaf.total for part in memory.constants))
    if row["counter"] == "peak_reserved":
        return answer.reserved_bytes
    if row["counter"] == "driver":
        return answer.driver_bytes
    assert row["counter"] in ("peak_allocated", "peak_allocated_max_over_ranks")
    return memory.peak[1].bytes + workspace


def operator_bytes(name: str, program: str, size: int) -> int:
    """A loss alone (of so many words) or with its head (of so many tokens), in a benchmark that repeats its step."""
    if name == "cross_entropy" and program == "liger":
        return liger_ops.ligers_loss(size)
    if name == "cross_entropy":
        return liger_ops.torchs_loss(size)
    return liger_ops.torchs_head(size) if program == "huggingface" else liger_ops.ligers_head(size)


def error_percent(row: dict[str, Any], found: int) -> float:
    return round(100 * (found / (row["measured"] * UNITS[row["unit"]]) - 1), 1) + 0.0  # no minus before a zero


def summary() -> str:
    errors = [abs(row["error_percent"]) for row in PREDICTED]
    near = sum(error <= 10 for error in errors)
    return f"{near} of {len(errors)} predicted rows within 10 %, median error {median(errors):.1f} %"


def counter_of(row: dict[str, Any]) -> str:
    return str(row["counter"].removesuffix("_max_over_ranks").removesuffix("_per_gpu").replace("_", " "))


def errors_of(rows: Iterable[dict[str, Any]]) -> list[float]:
    """The absolute errors of the rows that are predicted, rising."""
    return sorted(abs(row["error_percent"]) for row in rows if "error_percent" in row)


def ninetieth(errors: list[float]) -> float:
    """The 90th percentile: nine of ten are at most as large."""
    return errors[ceil(0.9 * len(errors)) - 1]


def table(confidence: str = "high") -> list[str]:
    """Rows, predictions and errors by program and counter."""
    lines = ["| program | counter | rows | predicted | median | 90 % within |", "|---|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in ROWS:
        if row["measured"] and row["confidence"] == confidence:
            groups.setdefault((row["program"], counter_of(row)), []).append(row)
    every = [row for rows in groups.values() for row in rows]
    for (program, counter), rows in (*sorted(groups.items()), (("all", ""), every)):
        errors = errors_of(rows)
        figures = (f"{median(errors):.1f} %", f"{ninetieth(errors):.1f} %") if errors else ("", "")
        lines.append(f"| {program} | {counter} | {len(rows)} | {len(errors)} | {' | '.join(figures)} |")
    return lines


def listing() -> list[str]:
    """Every row with its error, or why it is not predicted."""
    lines = []
    for row in ROWS:
        said = f"{row['error_percent']:+.1f} %" if "error_percent" in row else row.get("not_predicted", "")
        lines.append(
            f"{row['confidence']:6} {row['program']:16} {counter_of(row):16} {row['id']:60} {said}  {row.get('why', '')[:60]}"
        )
    return lines


def recorded() -> str:
    """The file with today's predictions: one row a line."""
    for row in ROWS:
        if "not_predicted" not in row:
            row["predicted"] = predicted(row)
            if row["measured"]:
                row["error_percent"] = error_percent(row, row["predicted"])
    configs = ",\n".join(f"    {json.dumps(name)}: {json.dumps(config)}" for name, config in CONFIGS.items())
    rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in ROWS)
    return f'{{\n  "configs": {{\n{configs}\n  }},\n  "rows": [\n{rows}\n  ]\n}}\n'


def main() -> None:
    """Rewrite the recorded predictions after a change that is meant to move them; `make docs` then rewrites docs/accuracy.md."""
    FILE.write_text(recorded(), encoding="utf-8")
    print(*listing(), *table(), *table("medium"), summary(), sep="\n")


if __name__ == "__main__":
    main()
