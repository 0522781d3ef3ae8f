"""The parts of an answer as the pages name and colour them: one name, one colour and one place in the order everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from calc.breakdown import Breakdown, Component, plain_label
from calc.serving import ServingAnswer
from calc.training import TrainingAnswer
from calc.training.peak_breakdown import components

Parts = list[tuple[str, float]]

OVERHEAD: Final = "CUDA and framework overhead"
FREE: Final = "free"

# name: colour that reads on light and dark, in the order in which bars stack
COLOURS: Final = {
    "weights": "#3b76b8",
    "gradients": "#d98c1f",
    "optimizer states": "#2f9477",
    "activations": "#b8568a",
    "all-gathered weights (FSDP)": "#7d9ad6",
    "temporary buffers (logits, workspace)": "#c8553d",
    "optimizer temporaries (foreach)": "#8fae3c",
    "reference model": "#5aa7c7",
    "gradient buckets (DDP)": "#b89b4e",
    "older weights (PipeDream)": "#6b5fa8",
    "other micro-batches in flight": "#c98bb0",
    "KV cache": "#9a6fc4",
    OVERHEAD: "#7b8794",
    FREE: "#8796a840",
}

_NAMES: Final = {
    "parameters": "weights",
    "optimizer": "optimizer states",
    "gathered": "all-gathered weights (FSDP)",
    "working": "temporary buffers (logits, workspace)",
    "optimizer_step": "optimizer temporaries (foreach)",
    "reference": "reference model",
    "segments": "activations",
    "constants": "activations",
    "pass": "temporary buffers (logits, workspace)",
    "ddp_buckets": "gradient buckets (DDP)",
    "older_weights": "older weights (PipeDream)",
    "in_flight": "other micro-batches in flight",
    "state": "KV cache",
    "rollout": "KV cache",
}


spaced = plain_label


def name_of(component: str) -> str:
    """The part that a component is, as the pages call it."""
    return _NAMES.get(component, spaced(component))


def ordered(parts: Iterable[tuple[str, float]]) -> Parts:
    """Parts of one name added up, in the order of all bars; empty ones left out."""
    sums: dict[str, float] = {}
    for name, value in parts:
        sums[name] = sums.get(name, 0) + value
    known = [name for name in COLOURS if name in sums]
    return [(name, sums[name]) for name in [*known, *(set(sums) - set(known))] if sums[name]]


def _named(components_: Iterable[Component]) -> Parts:
    return [(name_of(part.name), part.total) for part in components_]


def of_training(answer: TrainingAnswer, most: int = 16) -> dict[str, Parts]:
    """What one GPU of each stage holds at its highest point, as nvidia-smi shows it; the first `most` stages."""
    rows = {}
    for memory in answer.stages[:most]:
        overhead = sum(answer.totals_of(memory).overhead)
        rows[f"stage {memory.stage.rank}"] = ordered([*_named(components(memory)), (OVERHEAD, overhead)])
    return rows


def of_worst_stage(answer: TrainingAnswer) -> Parts:
    """The same of the stage that needs most; the parts sum to `driver_bytes`."""
    return ordered([*_named(components(answer.worst)), (OVERHEAD, sum(answer.overhead))])


def of_serving(answer: ServingAnswer) -> Parts:
    """What one GPU holds under this load; the parts sum to what is needed."""
    found = _named(answer.breakdown.root.children)
    rest = (answer.capacity.needed or 0) - sum(value for _, value in found)
    return ordered([*found, (OVERHEAD, max(0, rest))])


def top(breakdown: Breakdown, most: int = 9) -> Parts:
    """A few parts that make the whole, for a chart: the largest are opened until there are `most` of them."""
    found: list[tuple[str, Component, int]] = [("", breakdown.root, 1)]
    while True:
        opened = [each for each in found if each[1].children and len(found) + len(each[1].children) - 1 <= most]
        if not opened:
            break
        path, part, copies = max(opened, key=lambda each: each[1].total * each[2])
        at = found.index((path, part, copies))
        prefix = f"{path}/" if path else ""
        found[at : at + 1] = [(prefix + child.name, child, copies * part.count) for child in part.children]
    return [(breakdown.label(path), part.total * copies) for path, part, copies in found if part.total]


def values_at(breakdown: Breakdown, paths: Sequence[str]) -> Parts:
    """What a breakdown of the same shape has in the parts that `top` found in another."""
    prefix = f"{breakdown.root.name}/"
    rows = [(spaced(row.path.removeprefix(prefix)), row.value) for row in breakdown.rows()]
    below = spaced("/")
    return [(at, sum(value for path, value in rows if path == at or path.startswith(at + below))) for at in paths]
