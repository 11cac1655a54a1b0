from __future__ import annotations

import random
import secrets
from collections import OrderedDict

import pytest

from kvstore.errors import InvariantViolated
from kvstore.master.books.allocator import ALIGNMENT, ReservedRanges, SegmentAllocator, padded


def test_any_order_of_use_conserves_every_byte():
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    for _ in range(20):
        reserved = ReservedRanges(rng.randint(0, 100 * ALIGNMENT))
        ranges: dict[int, int] = {}
        for _ in range(rng.choice([0, 10, 60])):
            offset, nbytes = rng.randrange(120) * ALIGNMENT, rng.randint(1, 300)
            taken = range(offset, offset + padded(nbytes))
            free = taken.stop <= reserved.capacity and not any(
                max(taken.start, o) < min(taken.stop, o + padded(n)) for o, n in ranges.items()
            )
            assert reserved.reserve(offset, nbytes) == free, seed
            if free:
                ranges[offset] = nbytes
            elif ranges and rng.random() < 0.5:
                gone = rng.choice(list(ranges))
                reserved.release(gone, ranges.pop(gone))
        allocator = reserved.allocator()
        for _ in range(200):
            if ranges and rng.random() < 0.45:
                offset = rng.choice(list(ranges))
                allocator.release(offset, ranges.pop(offset))
            else:
                nbytes = rng.randint(1, 1000)
                fits = padded(nbytes) <= allocator.largest_free
                offset = allocator.allocate(nbytes)
                assert (offset is not None) == fits, seed
                if offset is not None:
                    ranges[offset] = nbytes
            allocator.check_invariants((o, padded(n)) for o, n in ranges.items())
            assert allocator.used == sum(map(padded, ranges.values())), seed
        for offset, nbytes in ranges.items():
            allocator.release(offset, nbytes)
        assert allocator.free == allocator.largest_free == allocator.capacity
        assert allocator.free_ranges == (allocator.capacity > 0)


def test_equal_blocks_are_neighbours_and_small_ones_spare_the_large_hole():
    allocator = SegmentAllocator(64 * 100)
    offsets = [allocator.allocate(128) for _ in range(10)]
    assert offsets == [128 * i for i in range(10)]
    allocator.release(128, 128)
    assert allocator.allocate(100) == 128


def test_a_realistic_mix_fills_the_segment():
    """Blocks of the sizes of one model's layers and of a few models, in random order of use."""
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    allocator = SegmentAllocator(1 << 28)
    blocks: OrderedDict[int, int] = OrderedDict()
    utilisation = []
    for step in range(12_000):
        nbytes = rng.choice([16384, 18432, 24576, 65536, 69632, 131072, 262144])
        while (offset := allocator.allocate(nbytes)) is None:
            allocator.release(*blocks.popitem(last=False))
        blocks[offset] = nbytes
        for used in rng.sample(list(blocks), 2) if step % 4 == 0 and len(blocks) > 2 else ():
            blocks.move_to_end(used)
        if step > 8_000:
            utilisation.append(allocator.used / allocator.capacity)
    assert sum(utilisation) / len(utilisation) >= 0.95, seed
    assert allocator.largest_free <= allocator.free


def test_what_was_not_handed_out_cannot_be_given_back():
    allocator = SegmentAllocator(1024)
    allocator.allocate(128)
    for offset, nbytes in ((128, 64), (0, 256), (-64, 64), (1024, 64)):
        with pytest.raises(InvariantViolated, match="was not handed out"):
            allocator.release(offset, nbytes)
    with pytest.raises(InvariantViolated, match="after"):
        allocator.check_invariants([(0, 64)])
    reserved = ReservedRanges(1024)
    assert not reserved.reserve(100, 10)  # not aligned
    assert not reserved.reserve(-64, 10)
    assert not reserved.reserve(960, 65)
    assert not reserved.reserve(0, 0)
