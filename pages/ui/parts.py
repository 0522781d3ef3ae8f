"""The parts of an answer as the pages name and colour them: one name, one colour and one place in the order everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from calc.breakdown import Breakdown, Component, plain_label
from calc.serving import ServingAnswer
from calc.training import TrainingAnswer
from calc.training.peak_breakdown import components

Parts = list[tuple[str, float]]

OVERHEAD: Final = "CUDA and framework overhead"
FREE: Final = "free"
OTHER: Final = "other"

# name: colour that reads on light and dark, in the order in which bars stack; no two names of one table share a colour
MEMORY: Final = {
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
}
MODEL: Final = {  # parameters and FLOPs
    "attention": "#d98c1f",
    "attention scores": "#e2b45f",
    "recurrent layers": "#8fae3c",
    "MLP": "#3b76b8",
    "experts": "#5aa7c7",
    "router": "#6b5fa8",
    "norms": "#b89b4e",
    "embedding": "#2f9477",
    "head": "#b8568a",
    "vision and audio": "#9a6fc4",
    "6ND estimate": "#7d9ad6",
}
TIME: Final = {
    "forward": "#3b76b8",
    "input gradient": "#d98c1f",
    "weight gradient": "#2f9477",
    "recomputation": "#9a6fc4",
    "embedding and head": "#b8568a",
    "communication": "#c8553d",
    "pipeline bubble": "#c98bb0",
    "launches by the host": "#5aa7c7",
    "offload transfers": "#b89b4e",
    "optimizer": "#8fae3c",
}
COLOURS: Final = {**MEMORY, **MODEL, **TIME, OTHER: "#a3abb6", OVERHEAD: "#7b8794", FREE: "#8796a840"}

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
    "received": "activations",
    "later_gradients": "gradients",
    "gradient_partition": "gradients",
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


def colour_of(part: str) -> str:
    """The colour of a part; one for all that have no name of their own."""
    return COLOURS.get(part, COLOURS[OTHER])


def in_order(names: Iterable[str]) -> list[str]:
    """Names of parts, each once, in the order of all bars."""
    found = dict.fromkeys(names)
    return [*(name for name in COLOURS if name in found), *(name for name in found if name not in COLOURS)]


def ordered(parts: Iterable[tuple[str, float]]) -> Parts:
    """Parts of one name added up, in the order of all bars; empty ones left out."""
    sums: dict[str, float] = {}
    for name, value in parts:
        sums[name] = sums.get(name, 0) + value
    return [(name, sums[name]) for name in in_order(sums) if sums[name]]


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


# what a path of parameters or FLOPs belongs to: the first row that has one of its words
_ROLES: Final = (
    ("vision and audio", ("vision", "audio", "picture", "projector")),
    ("norms", ("norm",)),
    ("experts", ("expert",)),
    ("router", ("router",)),
    ("embedding", ("embedding", "per_layer_input", "altup")),
    ("head", ("head/", "pooler")),
    ("attention scores", ("attention/core",)),
    ("attention", ("attention", "indexer", "compressor")),
    ("recurrent layers", ("mamba", "delta_net", "recurren", "conv")),
    ("MLP", ("mlp",)),
)
# what a path of a step's seconds belongs to
_TIMES: Final = (
    ("embedding and head", ("ends/",)),
    ("forward", ("layers/forward",)),
    ("input gradient", ("layers/input_gradient",)),
    ("weight gradient", ("layers/weight_gradient",)),
    ("recomputation", ("layers/recomputed",)),
    ("communication", ("exposed_", "slowed_by_")),
    ("pipeline bubble", ("bubble",)),
    ("launches by the host", ("host",)),
    ("offload transfers", ("transfers",)),
    ("optimizer", ("optimizer",)),
)


def role_of(path: str) -> str:
    """What a path of a breakdown of parameters or FLOPs, without the name of the whole, belongs to."""
    return _first(path, _ROLES)


def _first(path: str, rows: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    return next((name for name, marks in rows if any(mark in f"{path}/" for mark in marks)), OTHER)


def by_role(breakdown: Breakdown) -> Parts:
    """Parameters or FLOPs by what they belong to; the parts sum to the whole."""
    return ordered((role_of(path), value) for path, value in _below(breakdown))


def of_time(breakdown: Breakdown) -> Parts:
    """A step's seconds by pass; the parts sum to the step."""
    return ordered((_first(path, _TIMES), value) for path, value in _below(breakdown))


def _below(breakdown: Breakdown) -> Iterable[tuple[str, float]]:
    prefix = f"{breakdown.root.name}/"
    return ((row.path.removeprefix(prefix), row.value) for row in breakdown.rows())
