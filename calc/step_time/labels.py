"""The parts of a step's time in plain words: `layers/forward/gemms` reads "matrix multiplications, forward"."""

from __future__ import annotations

from typing import Final

from calc.breakdown import plain_label

_WORK: Final = {
    "gemms": "matrix multiplications",
    "experts": "experts' matrix multiplications",
    "attention": "attention",
    "recurrence": "recurrences",
    "memory_bound": "operators bound by memory",
}
_PASSES: Final = {
    "forward": "forward",
    "input_gradient": "gradients of inputs",
    "weight_gradient": "gradients of weights",
    "recomputed": "computed again",
}
_SENT: Final = {
    "tensor": "tensor parallelism",
    "context": "context parallelism",
    "expert": "expert parallelism",
    "data": "data parallelism",
}
_OTHERS: Final = {
    "layers": "layers",
    "ends": "embedding and head",
    "exposed_communication": "communication that nothing hides",
    "exposed_gradients_and_weights": "gradients and weights, once a step, that nothing hides",
    "slowed_by_overlap": "work slowed by communication at the same time",
    "slowed_by_reduction": "work slowed by the gradients' reduction",
    "host": "waiting for the host's launches",
    "bubble": "waiting for other pipeline stages",
    "exposed_sends": "sends between pipeline stages",
    "optimizer": "optimizer",
    "transfers": "transfers to and from the host",
}


def part_label(path: str) -> str:
    """A part of a step by its path below the root, or a kind of work; what has no name of its own is shown as it is."""
    first, *rest = path.split("/")
    if first in ("layers", "ends") and rest:
        work = [_WORK[name] for name in rest[1:] if name in _WORK] or [_OTHERS[first]]
        of = " of embedding and head" if first == "ends" and len(rest) > 1 else ""
        return f"{work[0]}{of}, {_PASSES.get(rest[0], plain_label(rest[0]))}"
    if first == "exposed_communication" and rest:
        return f"{_SENT.get(rest[0], plain_label(rest[0]))}: {_OTHERS[first]}"
    return _OTHERS.get(path) or _WORK.get(path) or plain_label(path)
