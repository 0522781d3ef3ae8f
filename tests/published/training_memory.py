"""Predictions of the measured runs of training_memory.json: `python -m tests.published.training_memory` records them anew."""

from __future__ import annotations

import json
import re
from functools import cache
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
README = HERE.parent.parent / "README.md"

PREDICTED = [row for row in ROWS if "predicted" in row and row["measured"] and "held_out" not in row]
HELD_OUT = [row for row in ROWS if "held_out" in row]  # looked at when the prediction stood


@cache
def spec_of(name: str):
    """A catalogue's model, one of the file's own configs, or a catalogue's model with some fields changed."""
    given = CONFIGS.get(name, {"catalogue": name})
    base = load_config(given["catalogue"]) if "catalogue" in given else {}
    return from_config(base | {key: value for key, value in given.items() if key != "catalogue"}, name)


def answer_of(row: dict[str, Any]) -> TrainingAnswer:
    return train(spec_of(row["model"]), TrainingPlan(**row["plan"]), gpu(row["gpu"]))


def predicted(row: dict[str, Any]) -> int:
    """The bytes of the counter that was measured, on the rank that measured it: the last, or the one that holds most.

    `allocated` holds the workspaces of matmuls, which the allocator gives; `steady` is what stays between two steps.
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


def table() -> list[str]:
    """The README's table: measured and predicted in GiB."""
    lines = ["| run | program | counter | measured | predicted | error |", "|---|---|---|---|---|---|"]
    for row in (*PREDICTED, *HELD_OUT):
        measured, found = (size / GiB for size in (row["measured"] * UNITS[row["unit"]], row["predicted"]))
        counter = row["counter"].removesuffix("_max_over_ranks").replace("_", " ")
        cells = (
            row["run"] + " *" * ("held_out" in row),
            row["program"],
            counter,
            f"{measured:.2f}",
            f"{found:.2f}",
            f"{row['error_percent']:+.1f} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
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
    """Rewrite the recorded predictions and the README's table after a change that is meant to move them."""
    FILE.write_text(recorded(), encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    text = re.sub(r"\d+ of \d+ predicted rows within 10 %, median error [\d.]+ %", summary(), text)
    head, rows = table()[0], "\n".join(table())
    start = text.index(head)
    README.write_text(text[:start] + rows + text[text.index("\n\n", start) :], encoding="utf-8")
    print(rows, summary(), sep="\n")


if __name__ == "__main__":
    main()
