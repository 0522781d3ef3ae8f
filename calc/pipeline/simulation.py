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
    gradient its own input gradient. What another rank made is there `send` seconds after its end.
    """
    orders = order(plan.schedule, plan.stages, plan.microbatches, plan.chunks)
    ranks = [
        RankRun(ops, [plan.model_stage(rank, chunk) for chunk in range(plan.chunks)]) for rank, ops in enumerate(orders)
    ]
    tables = _tables(plan, ranks)
    turn = deque(range(plan.stages))
    queued = [True] * plan.stages
    while turn:
        rank = turn.popleft()
        queued[rank] = False
        if not _advance(ranks[rank], tables[rank]):
            continue
        for neighbour in ((rank + 1) % plan.stages, rank - 1 if rank else plan.stages - 1):
            if not queued[neighbour]:  # what this rank has made may be what the neighbour waits for
                queued[neighbour] = True
                turn.append(neighbour)
    if any(len(rank.ends) < len(rank.ops) for rank in ranks):
        raise RuntimeError(f"the order of {plan.schedule} waits for itself")  # our fault, whatever the input
    return tuple(ranks)


# When each micro-batch's input is there (None: not yet known); where each output goes; how long it takes; how long the send takes.
_Row = list[float | None]
_Table = dict[str, list[tuple[_Row, _Row, float, float]]]


def _tables(plan: PipelinePlan, ranks: list[RankRun]) -> list[_Table]:
    """For each rank, what an operation of each kind on each of its chunks waits for, makes and takes."""
    count, microbatches = plan.stages * plan.chunks, plan.microbatches
    forward, inputs, weight = (plan.seconds(name) for name in ("forward", "backward_input", "backward_weight"))
    # activations[i] go into part i, gradients[i] come out of it; the first and the last row are there from the start
    activations: list[_Row] = [[None] * microbatches for _ in range(count + 1)]
    gradients: list[_Row] = [[None] * microbatches for _ in range(count + 1)]
    activations[0] = [0.0] * microbatches
    gradients[count] = [0.0] * microbatches
    there: _Row = [0.0] * microbatches  # a weight gradient comes after its own input gradient in every order
    nowhere: _Row = [None] * microbatches
    tables = []
    for rank in ranks:
        table: _Table = {"F": [], "B": [], "I": [], "W": []}
        for part in rank.parts:  # the next part may lie on this rank too (where a V turns): then nothing is sent
            down = 0.0 if part + 1 in rank.parts else plan.send
            up = 0.0 if part - 1 in rank.parts else plan.send
            table["F"].append((activations[part], activations[part + 1], forward[part], down))
            table["B"].append((gradients[part + 1], gradients[part], inputs[part] + weight[part], up))
            table["I"].append((gradients[part + 1], gradients[part], inputs[part], up))
            table["W"].append((there, nowhere, weight[part], 0.0))
        tables.append(table)
    return tables


def _advance(rank: RankRun, table: _Table) -> bool:
    """Run the rank's operations until one needs what is not there yet. Whether any ran."""
    ops, starts, ends = rank.ops, rank.starts, rank.ends
    done, busy = len(ends), rank.busy
    free_at = ends[-1] if done else 0.0
    for index in range(done, len(ops)):
        kind, chunk, microbatch = ops[index]
        waits, makes, took, send = table[kind][chunk]
        ready = waits[microbatch]
        if ready is None:
            break
        start = ready if ready > free_at else free_at
        free_at = start + took
        makes[microbatch] = free_at + send
        busy += took
        starts.append(start)
        ends.append(free_at)
    rank.busy = busy
    return len(ends) > done
