"""Which way of training or serving a model fits which GPU, and how many of them it would take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from calc.errors import InputError, validated
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving import ServingPlan, serve
from calc.training import TrainingAnswer, TrainingPlan, train

COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of GPUs that are tried
_MOST_TP: Final = (
    8  # GPUs of one node, which tensor parallelism should not leave (Megatron-LM, arXiv 2104.04473, section 3.2)
)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to use a model: fields of the plan of `train` or of `serve`, besides those that are the same for all ways."""

    name: str
    command: Literal["train", "serve"]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One way on one kind of GPU: bytes that one GPU needs, and may take; None where that is unknown, which `why` then says.

    `count` is the smallest of COUNTS with which it fits, with FSDP (training) or tensor parallelism (serving); None: none does.
    """

    way: Way
    gpu: Gpu
    needed: int | None
    limit: int | None
    count: int | None
    why: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether one GPU is enough; None where that is unknown."""
        return None if self.needed is None or self.limit is None else self.count == 1


def fit_matrix(spec: ModelSpec, ways: Sequence[Way], gpus: Iterable[Gpu]) -> list[Cell]:
    """A cell for each way and GPU, way by way."""
    devices = list(gpus)
    return [cell for way in ways for cell in _ASK[way.command](spec, way, devices)]


def _training(spec: ModelSpec, way: Way, gpus: Sequence[Gpu]) -> Iterator[Cell]:
    """The step is worked out once for each count; only its overhead and its limit are the GPU's."""
    answers: dict[int, TrainingAnswer] = {}

    def needed(count: int, gpu: Gpu) -> tuple[int, int | None]:
        if count not in answers:
            layout = {"dp": count, "zero": 3 if count > 1 else 0}
            answers[count] = train(spec, validated(TrainingPlan, {**way.values, **layout}), None)
        answer = replace(answers[count], gpu=gpu)
        if count > 1 and gpu.memory_bytes is not None and answer.peak_bytes > gpu.memory_bytes:
            return answer.peak_bytes, gpu.memory_bytes  # too much already, whatever the allocator adds
        return answer.driver_bytes, gpu.memory_bytes

    yield from (_cell(way, gpu, COUNTS, needed) for gpu in gpus)


def _serving(spec: ModelSpec, way: Way, gpus: Sequence[Gpu]) -> Iterator[Cell]:
    def needed(count: int, gpu: Gpu) -> tuple[int | None, int | None]:
        capacity = serve(spec, validated(ServingPlan, {**way.values, "tp": count}), gpu).capacity
        return capacity.needed, capacity.limit

    yield from (_cell(way, gpu, COUNTS[: COUNTS.index(_MOST_TP) + 1], needed) for gpu in gpus)


def _cell(
    way: Way, gpu: Gpu, counts: Sequence[int], needed: Callable[[int, Gpu], tuple[int | None, int | None]]
) -> Cell:
    one: int | None = None
    limit: int | None = None
    why = ""
    for count in counts:
        try:
            bytes_, limit = needed(count, gpu)
        except InputError as error:
            why = why or str(error)
            continue
        one = bytes_ if count == 1 else one
        if bytes_ is None or limit is None:
            return Cell(way, gpu, bytes_, limit, None, f"no source gives the memory of {gpu.title}")
        if bytes_ <= limit:
            return Cell(way, gpu, one, limit, count)
    return Cell(way, gpu, one, limit, None, why if one is None else "")


_ASK: Final[Mapping[str, Callable[[ModelSpec, Way, Sequence[Gpu]], Iterator[Cell]]]] = {
    "train": _training,
    "serve": _serving,
}
