"""vLLM's own figures of its memory, from public logs and reports, against what is computed for the same plan from scratch.

`python tests/published/vllm_memory.py` prints the table. A row's plan is what its source states; nothing is set from its figures but
the driver's total of its card.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from calc.catalogue import load
from calc.hardware import gpu
from calc.model.config import from_config
from calc.model.spec import ModelSpec
from calc.serving import ServingPlan, serve
from calc.serving.vllm import profile
from calc.units import GiB

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "vllm_memory.json").read_text(encoding="utf-8"))
KEYS = ("weights", "activation", "non_torch", "kv")
_PLAN = ("tp", "pp", "max_seqs", "max_batched_tokens", "weights")


class Figure(NamedTuple):
    """One figure of one row, in GiB."""

    row: str
    key: str
    computed: float
    logged: float

    @property
    def error(self) -> float:
        return self.computed / self.logged - 1


def spec_of(row: dict[str, Any]) -> ModelSpec:
    """The row's model: of the catalogue, or by the fields of its config.json that the row carries."""
    return from_config(row["config"]) if "config" in row else load(row["model"])


def figures(row: dict[str, Any]) -> Iterator[Figure]:
    """What the row logs, computed."""
    card = replace(gpu(row["gpu"]), memory_bytes=int(row["total_gib"] * GiB))
    plan = ServingPlan(
        engine="vllm",
        engine_version=row["version"],
        context=row["context"],
        gpu_memory_utilization=row["utilization"],
        **{key: row[key] for key in _PLAN if key in row},
    )
    answer = serve(spec_of(row), plan, card)
    reserved = {part.name: part.total for part in answer.reserved}
    activation = answer.activation_bytes
    if plan.pp > 1:  # a log's first figures are the first stage's, and the answer's are those of the heaviest
        activation = sum(part.total for part in profile(answer.spec, plan, card, first=True, last=False))
    computed = {
        "weights": answer.weights_bytes + reserved.get("rotary_table", 0) + reserved.get("expert_padding", 0),
        "activation": activation,
        "non_torch": reserved["non_torch"],
        "kv": answer.capacity.budget or 0,
    }
    for key in KEYS:
        if f"{key}_gib" in row:
            yield Figure(row["id"], key, computed[key] / GiB, row[f"{key}_gib"])


def errors(key: str, version: str | None = None) -> list[float]:
    """Absolute relative errors of one figure over all rows, or over those of a version, in order."""
    chosen = (row for row in ROWS if version in (None, row["version"]))
    return sorted(abs(found.error) for row in chosen for found in figures(row) if found.key == key)


def versions() -> list[str]:
    """The versions of the rows, oldest first."""
    return sorted({row["version"] for row in ROWS}, key=lambda name: tuple(map(int, name.split("."))))


def main() -> None:
    for row in ROWS:
        for found in figures(row):
            print(
                f"{found.row:45} {found.key:11} {found.computed:8.3f} {found.logged:8.2f} {100 * found.error:+7.1f} %"
            )
    for key in KEYS:
        cuts = quantiles(errors(key), n=10)
        print(
            f"{key}: median {100 * cuts[4]:.1f} %, p90 {100 * cuts[8]:.1f} %, {len(errors(key))} figures",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
