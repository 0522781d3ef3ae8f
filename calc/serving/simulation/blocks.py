"""A pool of cache blocks with reference counts: sequences share the blocks of a common start, and copy one when they write to it.

PagedAttention (Kwon et al., arXiv 2309.06180, sections 4.3 and 4.4).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from calc.errors import InputError


@dataclass(slots=True)
class Sequence:
    """The blocks of one sequence in order, and its tokens."""

    blocks: list[int]
    tokens: int


@dataclass(slots=True)
class BlockPool:
    """`blocks` blocks of `size` tokens. `copies` counts the blocks that were copied because a sharer wrote to them."""

    blocks: int
    size: int
    copies: int = 0
    _free: list[int] = field(init=False)
    _users: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(self.blocks - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.blocks - len(self._free)

    def allocate(self, tokens: int) -> Sequence:
        """A sequence of so many tokens. InputError when the pool is too small: nothing is taken."""
        needed = -(-tokens // self.size)
        if needed > len(self._free):
            raise InputError(f"the cache has {len(self._free)} free blocks and the sequence needs {needed}", "blocks")
        return Sequence([self._take() for _ in range(needed)], tokens)

    def append(self, sequence: Sequence) -> None:
        """One more token: a new block where the last is full, a copy where others use it. InputError when none is free."""
        if sequence.tokens % self.size == 0:
            sequence.blocks.append(self._take())
        elif self._users[sequence.blocks[-1]] > 1:
            copy = self._take()
            self._release(sequence.blocks[-1])
            sequence.blocks[-1] = copy
            self.copies += 1
        sequence.tokens += 1

    def fork(self, sequence: Sequence) -> Sequence:
        """Another sequence with the same tokens: it takes no block of its own until it writes."""
        for block in sequence.blocks:
            self._users[block] += 1
        return Sequence(list(sequence.blocks), sequence.tokens)

    def free(self, sequence: Sequence) -> None:
        """Give the blocks back; those that others use stay."""
        for block in sequence.blocks:
            self._release(block)
        sequence.blocks.clear()
        sequence.tokens = 0

    def wasted(self, sequences: list[Sequence]) -> int:
        """Slots of used blocks that hold no token of these sequences."""
        last: dict[int, int] = {}
        for sequence in sequences:
            for at, block in enumerate(sequence.blocks):
                last[block] = max(last.get(block, 0), min(self.size, sequence.tokens - at * self.size))
        return sum(self.size - filled for filled in last.values())

    def _take(self) -> int:
        if not self._free:
            raise InputError("the cache has no free block", "blocks")
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._users[block] -= 1
        if not self._users[block]:
            del self._users[block]
            self._free.append(block)
