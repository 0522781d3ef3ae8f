"""PyTorch's caching allocator as a model: what it reserves of the device for a sequence of allocations and frees.

It asks the driver for segments, splits them into blocks and merges freed neighbours again. A request takes the smallest free block of
its pool and stream that is large enough; a block is split where enough is left over.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final

from calc.units import MiB, round_up

SOURCE: Final = "PyTorch 2.13, c10/cuda/CUDACachingAllocator.cpp: get_free_block, should_split, get_allocation_size"
URL: Final = "https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp"
MIN_BLOCK: Final = 512  # bytes: kMinBlockSize
SMALL: Final = MiB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT: Final = 2 * MiB  # kSmallBuffer
LARGE_SEGMENT: Final = 20 * MiB  # kLargeBuffer
LARGE_REQUEST: Final = 10 * MiB  # kMinLargeAlloc: from it on a segment is as large as its first request
LARGE_ROUND: Final = 2 * MiB  # kRoundLarge


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment; `before` and `after` are its neighbours in it."""

    size: int
    pool: _Pool
    number: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.number


@dataclass(slots=True, eq=False)
class _Pool:
    """The free blocks of one pool of one stream, by size, and of equals by age."""

    small: bool
    sizes: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)
    last: Block | None = None  # of an expandable segment

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.sizes, block.key)
        self.blocks[block.key] = block

    def remove(self, block: Block) -> None:
        block.free = False
        del self.sizes[bisect_left(self.sizes, block.key)]
        del self.blocks[block.key]

    def smallest(self, size: int) -> Block | None:
        """The smallest free block of at least `size`."""
        at = bisect_left(self.sizes, (size, -1))
        return self.blocks[self.sizes[at]] if at < len(self.sizes) else None


class CachingAllocator:
    """Counts `reserved` and `allocated` bytes and their highest values.

    `expandable`: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, one segment a pool and stream that grows at its end.
    `max_split_size`: blocks above so many bytes are not split (max_split_size_mb), and serve requests above it alone.
    `limit`: what the device has. A segment that goes beyond it is asked for again when all that is cached has been given back.
    """

    def __init__(
        self, *, expandable: bool = False, max_split_size: int | None = None, limit: int | None = None
    ) -> None:
        self.expandable, self.max_split_size, self.limit = expandable, max_split_size, limit
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._number = 0

    def malloc(self, size: int, stream: int = 0) -> Block:
        """A block for a storage of `size` bytes, asked for in a stream."""
        size = max(round_up(size, MIN_BLOCK), MIN_BLOCK)
        pool = self._pools.setdefault((size <= SMALL, stream), _Pool(size <= SMALL))
        block = self._found(pool, size)
        if block is None:
            block = self._grown(pool, size) if self.expandable else self._segment(pool, size)
        self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, joined to free neighbours."""
        self.allocated -= block.size
        pool = block.pool
        for other in (block.before, block.after):
            if other is not None and other.free:
                pool.remove(other)
                self._join(block, other)
        pool.add(block)

    def _found(self, pool: _Pool, size: int) -> Block | None:
        block, most = pool.smallest(size), self.max_split_size
        if block is None:
            return None
        if most is not None and (size < most <= block.size or (size >= most and block.size >= size + LARGE_SEGMENT)):
            return None
        pool.remove(block)
        return block

    def _segment(self, pool: _Pool, size: int) -> Block:
        """A new segment as one block."""
        whole = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < LARGE_REQUEST else round_up(size, LARGE_ROUND)
        self._reserve(whole)
        return self._block(whole, pool)

    def _grown(self, pool: _Pool, size: int) -> Block:
        """The end of the pool's one segment, grown by whole pages; a free block there is used up first."""
        page, last = (SMALL_SEGMENT if pool.small else LARGE_SEGMENT), pool.last
        if last is not None and last.free:
            more = round_up(size - last.size, page)
            pool.remove(last)
            last.size += more
            block = last
        else:
            more = round_up(size, page)
            block = self._block(more, pool)
            block.before, pool.last = last, block
            if last is not None:
                last.after = block
        self._reserve(more)
        return block

    def _reserve(self, size: int) -> None:
        if self.limit is not None and self.reserved + size > self.limit:
            self._give_back(size)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back(self, size: int) -> None:
        """What is cached, to the driver: segments of which nothing is in use (release_cached_blocks). Of expandable segments any free
        pages go, as many as it takes."""
        if self.expandable:
            self.reserved = max(min(self.reserved, self.allocated), min(self.reserved, (self.limit or 0) - size))
            return
        for pool in self._pools.values():
            for block in [block for block in pool.blocks.values() if block.before is None and block.after is None]:
                pool.remove(block)
                self.reserved -= block.size

    def _block(self, size: int, pool: _Pool) -> Block:
        self._number += 1
        return Block(size, pool, self._number)

    def _split(self, block: Block, size: int) -> None:
        """Cut what is left over off the end, where that is worth a block."""
        rest = block.size - size
        pool, most = block.pool, self.max_split_size
        enough = rest >= MIN_BLOCK if pool.small or self.expandable else rest > SMALL
        if not enough or (most is not None and not pool.small and size >= most):
            return
        other = self._block(rest, pool)
        block.size = size
        other.before, other.after, block.after = block, block.after, other
        if other.after is not None:
            other.after.before = other
        if pool.last is block:
            pool.last = other
        pool.add(other)

    def _join(self, block: Block, other: Block) -> None:
        """Make the free neighbour part of the block."""
        if other is block.before:
            block.before = other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        if block.pool.last is other:
            block.pool.last = block
        block.size += other.size
