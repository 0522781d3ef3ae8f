"""The largest micro-batch or sequence whose training step still fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from calc.errors import InputError, validated
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.training.answer import train
from calc.training.plan import TrainingPlan

LIMITS = {"micro_batch": 2**20, "seq": 2**24}  # of the plan's fields


def changed(plan: TrainingPlan, values: dict[str, object]) -> TrainingPlan:
    """The plan with other values. InputError when they do not go together."""
    return validated(TrainingPlan, plan.model_dump() | values)


def needed(spec: ModelSpec, plan: TrainingPlan, values: dict[str, object], gpu: Gpu | None) -> int | None:
    """Bytes per GPU (as the driver shows them) of the plan with other values; None when that plan is not allowed."""
    try:
        return train(spec, changed(plan, values), gpu).driver_bytes
    except InputError:
        return None


def with_own_share(spec: ModelSpec, plan: TrainingPlan, gpu: Gpu | None) -> TrainingPlan:
    """The plan with its own fragmentation as a share of the peak, which a search takes for the plans near it: the allocator is
    played once, and more memory is needed wherever more is allocated."""
    if plan.fragmentation_percent is not None:
        return plan
    answer = train(spec, plan, gpu)
    if answer.worst.replayed is None:  # an assumed share already
        return plan
    return changed(
        plan, {"fragmentation_percent": min(1000.0, 100 * answer.overhead.fragmentation / answer.peak_bytes)}
    )


def largest(spec: ModelSpec, plan: TrainingPlan, gpu: Gpu | None, field: Literal["micro_batch", "seq"]) -> int | None:
    """The largest value of the field with which the step fits, all else as planned; 0 when none does.

    None when the GPU's memory is unknown. A sequence is a multiple of what divides it (cp, and tp with sequence
    parallelism) and ends where learned positions end; a micro-batch divides a given global batch, and is any number where
    that is left open.
    """
    limit = gpu.memory_bytes if gpu else None
    if limit is None:
        return None

    plan = with_own_share(spec, plan, gpu)

    def bytes_of(value: int) -> int | None:
        return needed(spec, plan, {field: value}, gpu)

    if field == "micro_batch" and plan.global_batch is not None:
        fitting = (value for value in reversed(divisors(plan.batch // plan.dp)) if _within(bytes_of(value), limit))
        return next(fitting, 0)
    unit = sequence_unit(plan) if field == "seq" else 1
    most = LIMITS[field] if field == "micro_batch" else longest_sequence(spec)
    return _largest(range(unit, most + 1, unit), getattr(plan, field) // unit, bytes_of, limit)


def longest_sequence(spec: ModelSpec) -> int:
    """Tokens that the model takes: a learned table of positions has no row for more."""
    learned = any(weight.name == "position" for weight in spec.embeddings)
    return min(LIMITS["seq"], spec.max_position_embeddings) if learned else LIMITS["seq"]


def sequence_unit(plan: TrainingPlan) -> int:
    """What must divide the sequence."""
    return plan.cp * (plan.tp if plan.sharded_sequence else 1)


def divisors(number: int) -> list[int]:
    """The divisors of a number, rising."""
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return low + [number // each for each in reversed(low) if each * each != number]


def _within(value: int | None, limit: int) -> bool:
    return value is not None and value <= limit


def _largest(values: Sequence[int], start: int, bytes_of: Callable[[int], int | None], limit: int) -> int:
    """The last of the rising values that needs at most `limit` bytes, which rise with them; 0 when the first needs more.

    Guesses in turn by a straight line through what is known, since memory is nearly one, and by halves, so that the number
    of guesses stays bounded.
    """
    known: dict[int, int] = {}
    low, high = 0, len(values) + 1  # the first `low` fit, from `high` on none does
    guess, by_line = min(start, len(values)), True
    while high - low > 1:
        found = bytes_of(values[guess - 1])
        if found is None or found > limit:
            high = guess
        else:
            low = guess
        if found is not None:
            known[guess] = found
        guess = _guess(known, low, high, limit, by_line, len(values))
        by_line = not by_line
    return values[low - 1] if low else 0


def _guess(known: dict[int, int], low: int, high: int, limit: int, by_line: bool, most: int) -> int:
    """The next place to look, strictly between `low` and `high`."""
    if high > most:
        return min(4 * max(low, 1), most)
    if not low:
        return 1 if 1 not in known and high > 2 and by_line else max(1, high // 2)
    if by_line and low in known and high in known and known[high] > known[low]:
        at = low + (limit - known[low]) * (high - low) // (known[high] - known[low])
        return min(max(at, low + 1), high - 1)
    return (low + high) // 2
