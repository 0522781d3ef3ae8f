"""What a user says about a pipeline, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from calc.errors import InputError
from calc.pipeline.orders import model_stage
from calc.pipeline.schedules import SCHEDULES, check_layout, default_virtual_stages, planned_microbatches

MOST_CHUNKS = 2**18  # stages x microbatches x virtual_stages; each is simulated, and this many take about a second
_LONGEST = 1e9  # seconds


def _times(value: object) -> tuple[float, ...]:
    """One time, several, or text with commas between them, as a tuple of seconds."""
    parts: Sequence[object]
    if isinstance(value, str):
        parts = value.split(",")
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = (value,)
    return tuple(_time(part) for part in parts)


def _time(value: object) -> float:
    try:
        time = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        time = math.nan
    if not 0 <= time <= _LONGEST:  # False for NaN
        raise ValueError(f"each time must be a number from 0 to {_LONGEST:g}")
    return time


Times = Annotated[tuple[float, ...], BeforeValidator(_times)]


ScheduleName = Literal[
    "naive",
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "interleaved-zb",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "dualpipe-v",
    "pipedream",
]


class PipelinePlan(BaseModel):
    """A pipeline of `stages` ranks that each hold `virtual_stages` chunks of the model, and one step of micro-batches.

    `virtual_stages` left out is 1, or 2 where the schedule has several. `forward`, `backward_input` and `backward_weight`
    are the seconds of one micro-batch through all of a rank's chunks (only their ratios matter to the fractions): one number,
    or one for each rank, which its chunks share evenly, so that schedules are compared at equal work; or one number for each
    chunk, its own, in the order in which the forward meets them. `send` is the seconds from the end of an operation until
    another rank has what it made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schedule: ScheduleName = Field("1f1b", description="the order of operations")
    stages: int = Field(4, ge=1, le=1024, description="pipeline stages (ranks), p")
    microbatches: int = Field(8, ge=1, le=MOST_CHUNKS, description="micro-batches in a step, m")
    virtual_stages: int | None = Field(
        None, ge=1, le=64, description="chunks of the model on a rank, v; left out: the schedule's own number"
    )
    forward: Times = Field(
        (1.0,),
        description="time of a forward through a rank's layers, however many chunks; commas give one a rank or chunk",
    )
    backward_input: Times = Field((1.0,), description="time of the backward for the input")
    backward_weight: Times = Field((1.0,), description="time of the backward for the weights")
    send: float = Field(0.0, ge=0, le=_LONGEST, description="time of a send to the next or the previous rank")

    @field_validator("forward")
    @classmethod
    def _positive(cls, forward: tuple[float, ...]) -> tuple[float, ...]:
        if not all(time > 0 for time in forward):
            raise ValueError("each forward time must be above 0")
        return forward

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_layout(self.schedule, self.stages, self.microbatches, self.chunks)
        planned = planned_microbatches(self.schedule, self.stages, self.microbatches)
        size = self.stages * planned * self.chunks
        if size > MOST_CHUNKS:
            raise InputError(
                f"stages ({self.stages}) x microbatches ({planned}{' = 2 x stages - 1' * (planned > self.microbatches)}) "
                f"x virtual_stages ({self.chunks}) = {size} must be at most {MOST_CHUNKS}: every operation is simulated"
            )
        for field in ("forward", "backward_input", "backward_weight"):
            given, allowed = len(getattr(self, field)), (1, self.stages, self.stages * self.chunks)
            if given not in allowed:
                counts = " or ".join(str(count) for count in sorted(set(allowed)))
                raise InputError(
                    f"{field} has {given} times; it must have {counts} (one for all, for stages = {self.stages} "
                    f"or for stages x virtual_stages = {self.stages * self.chunks})",
                    field,
                )
        return self

    @property
    def chunks(self) -> int:
        """Chunks a rank: `virtual_stages`, or the schedule's own number when it is left out."""
        return default_virtual_stages(self.schedule) if self.virtual_stages is None else self.virtual_stages

    @property
    def even(self) -> bool:
        """Whether every chunk takes the same time."""
        return all(len(set(times)) == 1 for times in (self.forward, self.backward_input, self.backward_weight))

    def model_stage(self, rank: int, chunk: int) -> int:
        """Which of the stages x virtual_stages parts of the model a rank's chunk is, 0 for the first."""
        return model_stage(SCHEDULES[self.schedule].shape, self.stages, rank, chunk)

    def seconds(self, field: str) -> list[float]:
        """The times of `field` ("forward", ...) for each part of the model, in the model's order."""
        given: tuple[float, ...] = getattr(self, field)
        parts = self.stages * self.chunks
        if len(given) == 1:
            return [given[0] / self.chunks] * parts
        if len(given) == parts:
            return list(given)
        seconds = [0.0] * parts
        for rank, time in enumerate(given):
            for chunk in range(self.chunks):
                seconds[self.model_stage(rank, chunk)] = time / self.chunks
        return seconds
