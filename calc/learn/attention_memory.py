"""Attention with and without the square of scores in memory: numbers moved, bytes kept, and the softmax that needs one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from calc.errors import InputError
from calc.units import ceil_div

SOURCE: Final = "FlashAttention, arXiv 2205.14135, algorithms 0 and 1, theorem 2 (https://arxiv.org/abs/2205.14135)"
SOFTMAX_SOURCE: Final = (
    "Milakov and Gimelshein, Online normalizer calculation, arXiv 1805.02867 (https://arxiv.org/abs/1805.02867)"
)
_BYTES: Final = 2  # of a number in 16 bits
_MOST_SCORES: Final = 64


class AttentionMemoryPlan(BaseModel):
    """One head of attention in 16 bits, without a mask."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attention_tokens: int = Field(4096, ge=1, le=2**20, description="N: tokens that attend to one another")
    attention_head_size: int = Field(64, ge=1, le=1024, description="d: numbers of a query, a key and a value")
    on_chip_kib: int = Field(192, ge=1, le=2**20, description="memory of one multiprocessor on the chip, in KiB")


class OnlineSoftmaxPlan(BaseModel):
    """Scores of one query, read in blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scores: str = Field("1, 3, 2, 5, 0, 4", max_length=400, description="scores of one query, with commas")
    scores_a_block: int = Field(2, ge=1, le=_MOST_SCORES, description="scores read at once")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between the GPU's memory and the chip in the forward pass, and bytes kept beyond queries, keys, values and output."""

    standard: int
    flash: int
    standard_kept: int
    flash_kept: int
    block_queries: int
    block_keys: int


def traffic(plan: AttentionMemoryPlan) -> Traffic:
    """By the papers' algorithms. InputError where not one query and key fit on the chip."""
    tokens, size = plan.attention_tokens, plan.attention_head_size
    numbers = plan.on_chip_kib * 1024 // _BYTES
    if numbers < 4 * size:
        raise InputError.of("on_chip_kib", plan.on_chip_kib, f"4 rows of {size} numbers take {8 * size} bytes")
    keys = min(ceil_div(numbers, 4 * size), tokens)
    queries = min(keys, size)
    rounds = ceil_div(tokens, keys)
    # algorithm 0: Q and K read, S written; S read, P written; P and V read, O written
    standard = 4 * tokens * size + 4 * tokens**2
    # algorithm 1: K and V read once; in each round Q, O, l and m read, O, l and m written
    flash = 2 * tokens * size + rounds * (3 * tokens * size + 4 * tokens)
    kept_flash = 4 * tokens  # one fp32 logarithm of the sum for each query
    return Traffic(_BYTES * standard, _BYTES * flash, _BYTES * 2 * tokens**2, kept_flash, queries, keys)


@dataclass(frozen=True, slots=True)
class SoftmaxStep:
    """After a block: the largest score so far, what earlier sums are multiplied by, and the sum of exponentials below the largest."""

    block: tuple[float, ...]
    largest: float
    correction: float
    total: float


def read_scores(text: str) -> tuple[float, ...]:
    """Scores from text with commas. InputError names what is none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not 1 <= len(words) <= _MOST_SCORES:
        raise InputError.of("scores", text, f"there must be 1 to {_MOST_SCORES} numbers with commas")
    found = []
    for word in words:
        try:
            score = float(word)
        except ValueError:
            raise InputError.of("scores", word, "it must be a number, such as 3 or -0.5") from None
        if not abs(score) <= 1e4:
            raise InputError.of("scores", word, "it must be from -10000 to 10000")
        found.append(score)
    return tuple(found)


def online_softmax(scores: Sequence[float], block: int) -> tuple[SoftmaxStep, ...]:
    """The running maximum and sum; the last step's sum is the softmax's denominator, relative to the largest score."""
    largest, total, steps = -math.inf, 0.0, []
    for start in range(0, len(scores), block):
        part = tuple(scores[start : start + block])
        above = max(largest, *part)
        correction = math.exp(largest - above)
        total = total * correction + sum(math.exp(score - above) for score in part)
        largest = above
        steps.append(SoftmaxStep(part, largest, correction, total))
    return tuple(steps)
