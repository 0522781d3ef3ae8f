"""The schedules: what each one is, which layouts it can run, and how many micro-batches each rank holds at its peak."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from calc.errors import InputError
from calc.pipeline.orders import interleaved_warmup

_GPIPE = ("GPipe, arXiv 1811.06965, section 2.3", "https://arxiv.org/abs/1811.06965")
_PIPEDREAM = ("PipeDream, arXiv 1806.03377, section 3.3", "https://arxiv.org/abs/1806.03377")
_MEGATRON = ("Megatron-LM, arXiv 2104.04473, section 2.2", "https://arxiv.org/abs/2104.04473")
_BREADTH = ("Breadth-First Pipeline Parallelism, arXiv 2211.05953", "https://arxiv.org/abs/2211.05953")
_ZERO_BUBBLE = ("Zero Bubble Pipeline Parallelism, arXiv 2401.10241", "https://arxiv.org/abs/2401.10241")
_DUALPIPE = ("DualPipe, the repository's README", "https://github.com/deepseek-ai/DualPipe")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule.

    `chunks` says how many parts of the model a rank holds: "one", "two", or "any" (then 2 unless told).
    `shape` is how the parts lie over the ranks (see `orders.model_stage`). `pytorch` names the class of
    `torch.distributed.pipelining` that runs the same order, or is "".
    """

    title: str
    about: str
    source: str
    url: str
    chunks: str = "one"
    shape: str = "loop"
    pytorch: str = ""


SCHEDULES: Mapping[str, Schedule] = {
    "naive": Schedule(
        "Naive", "One micro-batch at a time goes up and down all stages; one stage works, the rest wait.", *_GPIPE
    ),
    "gpipe": Schedule("GPipe", "All forwards, then all backwards.", *_GPIPE, pytorch="ScheduleGPipe"),
    "1f1b": Schedule("1F1B", "One forward, one backward in turn, after a warm-up.", *_MEGATRON, pytorch="Schedule1F1B"),
    "interleaved": Schedule(
        "Interleaved 1F1B",
        "Each rank holds several chunks of the model, which divides the bubble by their number.",
        *_MEGATRON,
        chunks="any",
        pytorch="ScheduleInterleaved1F1B",
    ),
    "looped-bfs": Schedule(
        "Looped breadth-first",
        "Several chunks a rank; a chunk runs all micro-batches before the next chunk starts.",
        *_BREADTH,
        chunks="any",
        pytorch="ScheduleLoopedBFS",
    ),
    "interleaved-zb": Schedule(
        "Interleaved zero-bubble",
        "Interleaved, with weight gradients put off to fill the bubble.",
        *_ZERO_BUBBLE,
        chunks="any",
        pytorch="ScheduleInterleavedZeroBubble",
    ),
    "zb-h1": Schedule("ZB-H1", "1F1B's memory, with weight gradients put off to fill the bubble.", *_ZERO_BUBBLE),
    "zb-h2": Schedule("ZB-H2", "Twice the warm-up: no bubble for twice the activations.", *_ZERO_BUBBLE),
    "zb-v": Schedule(
        "ZB-V",
        "Two chunks a rank laid out as a V: no bubble at 1F1B's memory, when the three parts take equal time.",
        *_ZERO_BUBBLE,
        chunks="two",
        shape="v",
        pytorch="ScheduleZBVZeroBubble",
    ),
    "dualpipe-v": Schedule(
        "DualPipeV",
        "DualPipe folded into a V: in its main part a forward runs with a backward.",
        *_DUALPIPE,
        chunks="two",
        shape="v",
        pytorch="ScheduleDualPipeV",
    ),
    "pipedream": Schedule(
        "PipeDream",
        "1F1B that never flushes: each backward updates the weights, and each micro-batch in flight needs its own version. "
        "The ramps shown at both ends happen once in a training run.",
        *_PIPEDREAM,
    ),
}
_CHUNKS_ALLOWED: Mapping[str, tuple[int, int]] = {"one": (1, 1), "two": (2, 2), "any": (1, 64)}


def default_virtual_stages(schedule: str) -> int:
    """Chunks a rank when the user gives none: 1, or 2 where the schedule has several."""
    return 1 if SCHEDULES[schedule].chunks == "one" else 2


def planned_microbatches(schedule: str, stages: int, microbatches: int) -> int:
    """Micro-batches for which the order is laid out: ZB-V always plans for 2p - 1 and leaves out those that are not there."""
    return max(microbatches, 2 * stages - 1) if schedule == "zb-v" else microbatches


def check_layout(schedule: str, stages: int, microbatches: int, virtual_stages: int) -> None:
    """InputError when the schedule does not exist or cannot run such a layout; the message states the rule."""
    if schedule not in SCHEDULES:
        raise InputError.of("schedule", schedule, f"it must be one of {', '.join(SCHEDULES)}")
    low, high = _CHUNKS_ALLOWED[SCHEDULES[schedule].chunks]
    if not low <= virtual_stages <= high:
        rule = f"be {low}" if low == high else f"lie from {low} to {high}"
        raise InputError(f"virtual_stages ({virtual_stages}) must {rule} for schedule {schedule}", "virtual_stages")
    if schedule == "dualpipe-v" and microbatches < 2 * stages:
        raise InputError(
            f"microbatches ({microbatches}) must be at least 2 x stages ({stages}) for schedule dualpipe-v",
            "microbatches",
        )


def _interleaved(p: int, m: int, v: int, r: int) -> int:
    return min(m * v, interleaved_warmup(p, m, v, r, 2) + 1)


def _interleaved_zb(p: int, m: int, v: int, r: int) -> int:
    # Up to r weight gradients wait besides, so every rank holds as many.
    return min(m * v, interleaved_warmup(p, m, v, r, 1) + r + 1)


# (ranks, micro-batches, chunks a rank, rank) -> chunks held; the tests count the same in the orders.
_PEAKS: Mapping[str, Callable[[int, int, int, int], int]] = {
    "naive": lambda p, m, v, r: 1,
    "gpipe": lambda p, m, v, r: m,
    "1f1b": lambda p, m, v, r: min(m, p - r),
    "interleaved": _interleaved,
    "looped-bfs": lambda p, m, v, r: m * v,
    "interleaved-zb": _interleaved_zb,
    "zb-h1": lambda p, m, v, r: min(m, p),
    "zb-h2": lambda p, m, v, r: min(m, 2 * p - 1),
    "zb-v": lambda p, m, v, r: min(2 * m, 2 * p, m + r + 1),
    "dualpipe-v": lambda p, m, v, r: min(2 * m, 2 * p + 1),
    "pipedream": lambda p, m, v, r: min(m, p - r),
}


def in_flight(schedule: str, stages: int, microbatches: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Per rank, the most (micro-batch, chunk) pairs whose activations it holds at once.

    A pair is held from the start of its forward to the end of its backward (of its weight gradient, where that is split
    off). A chunk is 1/(stages * virtual_stages) of the model. Instant for any size. InputError as `check_layout`.
    """
    check_layout(schedule, stages, microbatches, virtual_stages)
    peak = _PEAKS[schedule]
    return tuple(peak(stages, microbatches, virtual_stages, rank) for rank in range(stages))


@cache
def weight_versions(schedule: str, stages: int) -> tuple[int, ...]:
    """Per rank, the versions of its weights that are alive: 1, but p - r under PipeDream once it runs steadily."""
    return tuple(stages - rank if schedule == "pipedream" else 1 for rank in range(stages))
