"""The model of PyTorch's caching allocator against its rules, each worked out by hand from CUDACachingAllocator.cpp."""

from __future__ import annotations

import random

import pytest

from calc.training.caching_allocator import CachingAllocator
from calc.units import MiB, round_up


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MiB),  # the small pool's segments are of 2 MiB
        (MiB, 2 * MiB),
        (MiB + 1, 20 * MiB),  # kLargeBuffer, up to 10 MiB
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),  # from kMinLargeAlloc on, in steps of 2 MiB
        (11 * MiB, 12 * MiB),
        (3 * 1024 * MiB + 1, 3 * 1024 * MiB + 2 * MiB),
    ],
)
def test_a_first_request_takes_a_segment(size, segment):
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert allocator.reserved == segment


def test_a_segment_of_20_mib_serves_what_fits_and_the_smallest_free_block_is_taken():
    allocator = CachingAllocator()
    first, second = allocator.malloc(6 * MiB), allocator.malloc(5 * MiB)
    assert allocator.reserved == 20 * MiB  # 9 MiB are left over
    large = allocator.malloc(30 * MiB)
    allocator.free(large)
    allocator.free(second)  # joined to the 9 MiB behind it
    taken = allocator.malloc(14 * MiB)  # from those 14, not from the 30
    assert allocator.reserved == 50 * MiB
    assert (taken.before, taken.size) == (first, 14 * MiB)


def test_what_is_left_of_a_block_is_split_off_only_above_1_mib():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(12 * MiB))
    assert allocator.malloc(11 * MiB).size == 12 * MiB  # a rest of 1 MiB stays with it
    assert allocator.allocated == 12 * MiB
    other = CachingAllocator()
    other.free(other.malloc(12 * MiB))
    assert other.malloc(10 * MiB).size == 10 * MiB


def test_a_hole_too_small_for_a_request_leaves_it_idle():
    """DeepSpeed's step: two flat copies of 16 bits are freed side by side, and fp32 of the same count does not fit in either."""
    allocator = CachingAllocator()
    halves = [allocator.malloc(1600 * MiB) for _ in range(2)]
    for half in halves:
        allocator.free(half)
    allocator.malloc(3200 * MiB)
    assert allocator.reserved == 6400 * MiB


def test_no_freed_block_is_lent_to_another_stream():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(40 * MiB, stream=1))
    allocator.malloc(40 * MiB, stream=0)
    assert (allocator.reserved, allocator.allocated) == (80 * MiB, 40 * MiB)


def test_an_expandable_segment_grows_at_its_end_by_what_a_free_block_there_lacks():
    allocator = CachingAllocator(expandable=True)
    first = allocator.malloc(40 * MiB)
    allocator.free(first)
    allocator.malloc(100 * MiB)
    assert allocator.reserved == 100 * MiB  # where segments of their own would take 140
    plain = CachingAllocator()
    plain.free(plain.malloc(40 * MiB))
    plain.malloc(100 * MiB)
    assert plain.reserved == 140 * MiB


def test_a_block_above_max_split_size_serves_no_smaller_request():
    allocator = CachingAllocator(max_split_size=64 * MiB)
    allocator.free(allocator.malloc(200 * MiB))
    allocator.malloc(32 * MiB)
    assert allocator.reserved == 232 * MiB


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_fill_their_segments_and_all_join_again_once_freed(expandable):
    chance, allocator = random.Random(1), CachingAllocator(expandable=expandable)
    blocks, asked = [], 0
    for _ in range(3000):
        if blocks and chance.random() < 0.5:
            block, size = blocks.pop(chance.randrange(len(blocks)))
            allocator.free(block)
            asked -= size
        else:
            size = chance.choice([512, 4096, MiB, 3 * MiB, 25 * MiB, 70 * MiB])
            blocks.append((allocator.malloc(size), size))
            asked += size
        assert asked <= allocator.allocated <= allocator.reserved
    for block, _ in blocks:
        allocator.free(block)
    assert allocator.allocated == 0
    again = allocator.reserved
    allocator.malloc(round_up(70 * MiB, 512))
    assert allocator.reserved == again  # it is all there still


def test_near_the_limit_what_is_cached_goes_back_before_more_is_asked_for():
    """release_cached_blocks: whole segments without a block in use."""
    allocator = CachingAllocator(limit=100 * MiB)
    kept, freed = allocator.malloc(30 * MiB), allocator.malloc(40 * MiB)
    allocator.free(freed)
    allocator.malloc(50 * MiB)
    assert (allocator.reserved, allocator.peak_reserved) == (80 * MiB, 80 * MiB)
    allocator.free(kept)
    allocator.malloc(20 * MiB)  # of the segment that is there
    assert allocator.reserved == 80 * MiB
    unlimited = CachingAllocator()
    unlimited.free(unlimited.malloc(40 * MiB))
    unlimited.malloc(50 * MiB)
    assert unlimited.reserved == 90 * MiB


def test_of_expandable_segments_free_pages_go_back():
    allocator = CachingAllocator(expandable=True, limit=100 * MiB)
    first, second = allocator.malloc(60 * MiB, 1), allocator.malloc(40 * MiB, 2)
    allocator.free(first)
    allocator.malloc(60 * MiB, 2)
    assert allocator.peak_reserved == 100 * MiB
    assert second.size == 40 * MiB
