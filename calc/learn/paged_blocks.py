"""A paged KV cache: sequences in blocks, the common prompt shared until one of them writes into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from calc.serving.simulation.blocks import BlockPool
from calc.units import ceil_div

SOURCE: Final = "PagedAttention, arXiv 2309.06180, sections 4.3 and 4.4 (https://arxiv.org/abs/2309.06180)"


class PagedBlocksPlan(BaseModel):
    """Several answers to one prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared_prompt: int = Field(9, ge=1, le=64, description="tokens of the prompt")
    answers: int = Field(2, ge=1, le=8, description="answers that are sampled for it")
    answer_tokens: int = Field(3, ge=0, le=64, description="tokens of each answer so far")
    tokens_a_block: int = Field(4, ge=1, le=64, description="tokens of one block")
    reserved_tokens: int = Field(
        32, ge=1, le=256, description="tokens that a cache without blocks reserves for each sequence"
    )


@dataclass(frozen=True, slots=True)
class Blocks:
    """`tables[sequence]` are its blocks in order, `users` the sequences of each block; slots are places of one token."""

    tables: tuple[tuple[int, ...], ...]
    tokens: int
    users: dict[int, int]
    copied: int
    slots: int
    wasted: int
    contiguous_slots: int
    contiguous_wasted: int


def paged_blocks(plan: PagedBlocksPlan) -> Blocks:
    """The cache after the answers' tokens, one of each in turn."""
    tokens, size = plan.shared_prompt + plan.answer_tokens, plan.tokens_a_block
    pool = BlockPool(plan.answers * ceil_div(tokens, size) + 1, size)
    first = pool.allocate(plan.shared_prompt)
    sequences = [first, *(pool.fork(first) for _ in range(plan.answers - 1))]
    for _ in range(plan.answer_tokens):
        for sequence in sequences:
            pool.append(sequence)
    tables = tuple(tuple(sequence.blocks) for sequence in sequences)
    users = {block: sum(block in table for table in tables) for table in tables for block in table}
    reserved = max(plan.reserved_tokens, tokens) * plan.answers
    return Blocks(
        tables,
        tokens,
        users,
        pool.copies,
        pool.used * size,
        pool.wasted(sequences),
        reserved,
        reserved - tokens * plan.answers,
    )
