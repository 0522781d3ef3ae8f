"""A pipeline's step, run operation by operation on paper."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from calc.pipeline.orders import Op, order
from calc.pipeline.plan import PipelinePlan


@dataclass(slots=True)
class RankRun:
    """One rank's step: its operations in order, and when each one starts and ends, in seconds.

    `parts` says which part of the model each of its chunks is.
    """

    ops: list[Op]
    parts: list[int]
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    busy: float = 0.0

    @property
    def first(self) -> float:
        """Start of the first operation."""
        return self.starts[0]

    @property
    def last(self) -> float:
        """End of the last operation."""
        return self.ends[-1]

    @property
    def waiting(self) -> float:
        """Seconds idle between the first operation and the last."""
        return max(0.0, self.last - self.first - self.busy)

    def peak(self) -> int:
        """The most (micro-batch, chunk) pairs held at once.

        A pair is held from its forward to its backward, or to its weight gradient where that is split off.
        """
        held = peak = 0
        for kind, _, _ in self.ops:
            if kind == "F":
                held += 1
                peak = max(peak, held)
            elif kind != "I":
                held -= 1
        return peak


def run(plan: PipelinePlan) -> tuple[RankRun, ...]:
    """Run every rank's order: each operation starts as soon as its rank is free and what it needs is there.

    A forward needs the forward of the part before it, a backward (or input gradient) that of the part after it, a weight
    gradient its own input gradient. Sending takes no time.
    """
    orders = order(plan.schedule, plan.stages, plan.microbatches, plan.chunks)
    ranks = [
        RankRun(ops, [plan.model_stage(rank, chunk) for chunk in range(plan.chunks)]) for rank, ops in enumerate(orders)
    ]
    arrivals = _Arrivals(plan)
    turn = deque(range(plan.stages))
    queued = [True] * plan.stages
    while turn:
        rank = turn.popleft()
        queued[rank] = False
        if not _advance(ranks[rank], arrivals):
            continue
        for neighbour in ((rank + 1) % plan.stages, rank - 1 if rank else plan.stages - 1, rank):
            if not queued[neighbour]:  # what this rank has made may be what the neighbour waits for
                queued[neighbour] = True
                turn.append(neighbour)
    if any(len(rank.ends) < len(rank.ops) for rank in ranks):
        raise RuntimeError(f"the order of {plan.schedule} waits for itself")  # our fault, whatever the input
    return tuple(ranks)


class _Arrivals:
    """When each input is there (None: not yet known), by part of the model and micro-batch; and how long each part takes."""

    def __init__(self, plan: PipelinePlan) -> None:
        parts, microbatches = plan.stages * plan.chunks, plan.microbatches
        forward, inputs, weight = (plan.seconds(name) for name in ("forward", "backward_input", "backward_weight"))
        whole = [a + b for a, b in zip(inputs, weight, strict=True)]
        self.seconds = {"F": forward, "B": whole, "I": inputs, "W": weight}
        # activations[i] go into part i, gradients[i] come out of it; the first and the last row are there from the start.
        self.activations: list[list[float | None]] = [[None] * microbatches for _ in range(parts + 1)]
        self.gradients: list[list[float | None]] = [[None] * microbatches for _ in range(parts + 1)]
        self.activations[0] = [0.0] * microbatches
        self.gradients[parts] = [0.0] * microbatches


def _advance(rank: RankRun, arrivals: _Arrivals) -> bool:
    """Run the rank's operations until one needs what is not there yet. Whether any ran."""
    activations, gradients, seconds = arrivals.activations, arrivals.gradients, arrivals.seconds
    ops, starts, ends = rank.ops, rank.starts, rank.ends
    done = len(ends)
    free_at = ends[-1] if done else 0.0
    for index in range(done, len(ops)):
        kind, chunk, microbatch = ops[index]
        part = rank.parts[chunk]
        if kind == "F":
            ready = activations[part][microbatch]
        elif kind == "W":
            ready = gradients[part][microbatch]
        else:
            ready = gradients[part + 1][microbatch]
        if ready is None:
            break
        start = ready if ready > free_at else free_at
        took = seconds[kind][part]
        free_at = start + took
        if kind == "F":
            activations[part + 1][microbatch] = free_at
        elif kind != "W":
            gradients[part][microbatch] = free_at
        rank.busy += took
        starts.append(start)
        ends.append(free_at)
    return len(ends) > done
