"""Static and continuous batching: the same requests, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from calc.errors import InputError

SOURCE: Final = "Orca, OSDI 2022, sections 3.1 and 4.2 (https://www.usenix.org/conference/osdi22/presentation/yu)"
_MOST: Final = 64


class BatchingPlan(BaseModel):
    """Requests in the order in which they wait, by the tokens that each of them makes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request_tokens: str = Field(
        "3, 7, 2, 9, 4, 6, 1, 8", max_length=400, description="tokens that each request makes, with commas"
    )
    slots: int = Field(4, ge=1, le=16, description="requests that a step takes")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request in one slot, from a step to another (which it no longer takes)."""

    slot: int
    request: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Batching:
    """The turns of all requests. `steps` is their end; `used` the share of slots and steps that made a token."""

    turns: tuple[Turn, ...]
    steps: int
    used: float


def read_lengths(text: str) -> tuple[int, ...]:
    """Lengths from text with commas. InputError names what is none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not 1 <= len(words) <= _MOST:
        raise InputError.of("request_tokens", text, f"there must be 1 to {_MOST} whole numbers with commas")
    for word in words:
        if not (word.isascii() and word.isdigit() and 1 <= int(word[:5]) <= 1000 and len(word) <= 4):
            raise InputError.of("request_tokens", word, "it must be a whole number from 1 to 1000")
    return tuple(map(int, words))


def static(plan: BatchingPlan) -> Batching:
    """Batches of as many requests as there are slots; the next begins once the longest of a batch has ended."""
    lengths, turns, start = read_lengths(plan.request_tokens), [], 0
    for first in range(0, len(lengths), plan.slots):
        batch = lengths[first : first + plan.slots]
        turns += [Turn(slot, first + slot, start, start + length) for slot, length in enumerate(batch)]
        start += max(batch)
    return _batching(turns, plan.slots)


def continuous(plan: BatchingPlan) -> Batching:
    """A request begins in the step after one has ended, in its slot."""
    free, turns = [0] * plan.slots, []
    for request, length in enumerate(read_lengths(plan.request_tokens)):
        slot = min(range(plan.slots), key=lambda one: (free[one], one))
        turns.append(Turn(slot, request, free[slot], free[slot] + length))
        free[slot] += length
    return _batching(turns, plan.slots)


def _batching(turns: list[Turn], slots: int) -> Batching:
    steps = max(turn.end for turn in turns)
    return Batching(tuple(turns), steps, sum(turn.end - turn.start for turn in turns) / (slots * steps))
