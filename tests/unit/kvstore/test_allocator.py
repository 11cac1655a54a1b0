from __future__ import annotations

import random
import secrets

import pytest

from kvstore.errors import InvariantViolated
from kvstore.master.allocator import ALIGNMENT, SegmentAllocator, padded


def test_any_order_of_use_conserves_every_byte():
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    for _ in range(20):
        allocator = SegmentAllocator(rng.randint(0, 100 * ALIGNMENT))
        ranges: dict[int, int] = {}
        for _ in range(200):
            if ranges and rng.random() < 0.45:
                offset = rng.choice(list(ranges))
                allocator.release(offset)
                del ranges[offset]
            elif rng.random() < 0.3:
                offset, nbytes = rng.randrange(120) * ALIGNMENT, rng.randint(1, 300)
                taken = range(offset, offset + padded(nbytes))
                free = taken.stop <= allocator.capacity and not any(
                    max(taken.start, o) < min(taken.stop, o + padded(n)) for o, n in ranges.items()
                )
                assert allocator.reserve(offset, nbytes) == free, seed
                if free:
                    ranges[offset] = nbytes
            else:
                nbytes = rng.randint(1, 1000)
                fits = padded(nbytes) <= allocator.largest_free
                offset = allocator.allocate(nbytes)
                assert (offset is not None) == fits, seed
                if offset is not None:
                    ranges[offset] = nbytes
            allocator.check_invariants()
            assert allocator.used == sum(map(padded, ranges.values())), seed
        for offset in list(ranges):
            allocator.release(offset)
        assert allocator.free == allocator.largest_free == allocator.capacity


def test_equal_blocks_are_neighbours_and_small_ones_spare_the_large_hole():
    allocator = SegmentAllocator(64 * 100)
    offsets = [allocator.allocate(128) for _ in range(10)]
    assert offsets == [128 * i for i in range(10)]
    allocator.release(128)
    assert allocator.allocate(100) == 128


def test_what_was_not_handed_out_cannot_be_given_back():
    allocator = SegmentAllocator(1024)
    allocator.allocate(128)
    with pytest.raises(InvariantViolated, match="offset 64"):
        allocator.release(64)
    assert not allocator.reserve(100, 10)  # not aligned
    assert not allocator.reserve(-64, 10)
    assert not allocator.reserve(960, 65)
