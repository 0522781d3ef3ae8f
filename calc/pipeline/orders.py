"""The order in which each rank of a pipeline runs its operations, one builder a schedule.

Every builder takes (p, m, v, r) = (ranks, micro-batches, chunks a rank holds, this rank) and returns the rank's operations.
Waiting is no part of an order: `calc.pipeline.simulation` finds when each operation can start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

# One operation: its kind, F (forward), B (whole backward), I (input gradient) or W (weight gradient), chunk and micro-batch.
Op = tuple[str, int, int]
Slot = tuple[int, int]  # chunk, micro-batch
Builder = Callable[[int, int, int, int], list[Op]]


def order(schedule: str, stages: int, microbatches: int, virtual_stages: int) -> list[list[Op]]:
    """Every rank's operations. KeyError for an unknown schedule; the schedule's own rules are checked by PipelinePlan."""
    build = BUILDERS[schedule]
    return [build(stages, microbatches, virtual_stages, rank) for rank in range(stages)]


def model_stage(shape: str, stages: int, rank: int, chunk: int) -> int:
    """Which of the p·v parts of the model (in the order a forward meets them) a chunk of a rank is.

    "loop" deals the parts out like cards; "v" runs down the ranks and back up, so rank 0 has the first and the last.
    """
    if shape == "v" and chunk % 2 == 1:
        return (chunk + 1) * stages - 1 - rank
    return chunk * stages + rank


def round_sizes(stages: int, microbatches: int) -> list[int]:
    """Micro-batches per round of an interleaved schedule: as many rounds as fit p in each, and no round under the next.

    Where the rounds come out equal this is PyTorch's rule; where they do not (PyTorch refuses), the first are one larger.
    """
    rounds = max(1, microbatches // stages)
    size, larger = divmod(microbatches, rounds)
    return [size + 1] * larger + [size] * (rounds - larger)


def interleaved_warmup(stages: int, microbatches: int, virtual_stages: int, rank: int, per_hop: int) -> int:
    """Forwards before the first backward: all chunks but the last of one round, and `per_hop` for each rank behind."""
    first_round = round_sizes(stages, microbatches)[0]
    return (virtual_stages - 1) * first_round + per_hop * (stages - 1 - rank)


def _by_rounds(p: int, m: int, chunks: Sequence[int]) -> list[Slot]:
    """Depth first: a round's micro-batches through every chunk before the next round starts."""
    slots: list[Slot] = []
    first = 0
    for size in round_sizes(p, m):
        slots += [(chunk, microbatch) for chunk in chunks for microbatch in range(first, first + size)]
        first += size
    return slots


def _alternate(forwards: list[Slot], backwards: list[Slot], warmup: int) -> list[Op]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    ops = [("F", *slot) for slot in forwards[:warmup]]
    steady = forwards[warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        ops += (("F", *forward), ("B", *backward))
    return ops + [("B", *slot) for slot in backwards[len(steady) :]]


def _alternate_split(forwards: list[Slot], backwards: list[Slot], warmup: int, lag: int) -> list[Op]:
    """The same with the backward split: each weight gradient comes `lag` input gradients after its own."""
    warmup = min(warmup, len(forwards))
    ops = [("F", *slot) for slot in forwards[:warmup]]
    steady = forwards[warmup:]
    for index, backward in enumerate(backwards):
        if index < len(steady):
            ops.append(("F", *steady[index]))
        ops.append(("I", *backward))
        if index >= lag:
            ops.append(("W", *backwards[index - lag]))
    return ops + [("W", *slot) for slot in backwards[max(0, len(backwards) - lag) :]]


def naive(p: int, m: int, v: int, r: int) -> list[Op]:
    """Model parallelism without a pipeline: a micro-batch goes up and down all ranks before the next one starts."""
    return [(kind, 0, microbatch) for microbatch in range(m) for kind in "FB"]


def gpipe(p: int, m: int, v: int, r: int) -> list[Op]:
    """All forwards, then all backwards."""
    return [(kind, 0, microbatch) for kind in "FB" for microbatch in range(m)]


def one_f_one_b(p: int, m: int, v: int, r: int) -> list[Op]:
    """A rank starts its backwards as soon as the first one can reach it. PipeDream runs the same order without a flush."""
    slots = [(0, microbatch) for microbatch in range(m)]
    return _alternate(slots, slots, p - 1 - r)


def interleaved(p: int, m: int, v: int, r: int) -> list[Op]:
    """1F1B over v chunks a rank, micro-batches in rounds of about p."""
    backwards = _by_rounds(p, m, range(v - 1, -1, -1))
    return _alternate(_by_rounds(p, m, range(v)), backwards, interleaved_warmup(p, m, v, r, 2))


def looped_bfs(p: int, m: int, v: int, r: int) -> list[Op]:
    """Breadth first: a chunk runs every micro-batch before the next chunk starts; backwards in the opposite order."""
    slots = [(chunk, microbatch) for chunk in range(v) for microbatch in range(m)]
    return [("F", *slot) for slot in slots] + [("B", *slot) for slot in reversed(slots)]


def interleaved_zb(p: int, m: int, v: int, r: int) -> list[Op]:
    """Interleaved with weight gradients r input gradients late; with one chunk a rank this is ZB-H1."""
    backwards = _by_rounds(p, m, range(v - 1, -1, -1))
    return _alternate_split(_by_rounds(p, m, range(v)), backwards, interleaved_warmup(p, m, v, r, 1), r)


def zb_h1(p: int, m: int, v: int, r: int) -> list[Op]:
    """1F1B's warm-up; weight gradients wait r input gradients, so that every rank holds p micro-batches."""
    slots = [(0, microbatch) for microbatch in range(m)]
    return _alternate_split(slots, slots, p - 1 - r, r)


def zb_h2(p: int, m: int, v: int, r: int) -> list[Op]:
    """Twice the warm-up of ZB-H1 fills the bubble before the first backward; every rank holds 2p - 1 micro-batches."""
    slots = [(0, microbatch) for microbatch in range(m)]
    return _alternate_split(slots, slots, 2 * (p - 1 - r), 2 * r)


class _Script:
    """Writes a rank's operations by chunk alone; it counts the micro-batches and queues the weight gradients."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.pending: list[Slot] = []

    def forward(self, chunk: int) -> None:
        self.ops.append(("F", chunk, self.forwards[chunk]))
        self.forwards[chunk] += 1

    def backward(self, chunk: int, split: bool = False) -> None:
        microbatch = self.backwards[chunk]
        self.ops.append(("I" if split else "B", chunk, microbatch))
        self.backwards[chunk] += 1
        if split:
            self.pending.append((chunk, microbatch))

    def weight(self, chunk: int | None = None) -> None:
        """The oldest weight gradient that waits (of one chunk, when given); nothing when none does."""
        for slot in self.pending:
            if chunk in (None, slot[0]):
                self.pending.remove(slot)
                self.ops.append(("W", *slot))
                return

    def backward_and_weight(self, chunk: int) -> None:
        self.backward(chunk, split=True)
        self.weight(chunk)


def zb_v(p: int, m: int, v: int, r: int) -> list[Op]:
    """Two chunks a rank, laid out as a V. Planned for at least 2p - 1 micro-batches; those beyond m are left out."""
    planned = max(2 * p - 1, m)
    script = _Script()
    for _ in range(2 * (p - r) - 1):
        script.forward(0)
    for _ in range(r):
        script.forward(1)
        script.forward(0)
    for _ in range(p - r):
        script.forward(1)
        script.backward_and_weight(1)
    while script.forwards[1] < planned:
        if script.forwards[0] < planned:
            script.forward(0)
        script.backward_and_weight(0)
        script.forward(1)
        script.backward_and_weight(1)
    for _ in range(r):
        script.backward(0, split=True)
        script.backward(1, split=True)
    for _ in range(p - r):
        script.backward_and_weight(0)
    for chunk in (1, 0):
        for _ in range(len(script.pending)):
            script.weight(chunk)
    return [op for op in script.ops if op[2] < m]


def dualpipe_v(p: int, m: int, v: int, r: int) -> list[Op]:
    """DualPipe folded into a V. A forward and the backward that it overlaps are written one after the other. m >= 2p."""
    script = _Script()
    for _ in range(2 * (p - 1 - r)):
        script.forward(0)
    for _ in range(r + 1):
        script.forward(0)
        script.forward(1)
    for _ in range(p - 1 - r):
        script.backward_and_weight(1)
        script.forward(1)
    for _ in range(m - 2 * p + r + 1):
        script.forward(0)
        script.backward(1)
        script.forward(1)
        script.backward(0)
    for _ in range(p - 1 - r):
        script.backward(1)
        script.forward(1)
        script.backward(0)
    # Of the last backwards of both chunks the second half is split: its weight gradients fill the way out.
    for index in range(2 * (r + 1)):
        script.backward(1 - index % 2, split=index > r)
    for _ in range(p - 1 - r):
        script.weight()
        script.backward(0, split=True)
    while script.pending:
        script.weight()
    return script.ops


BUILDERS: Mapping[str, Builder] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "interleaved-zb": interleaved_zb,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
    "pipedream": one_f_one_b,
}
