"""Checksums that are met one after the other, against a dictionary."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

import numpy as np

from kvstore import PutOutcome
from kvstore.client.block_sums import BlockSums
from kvstore.client.pieces import Pieces
from tests.support.store_pool import Pool
from transfer import allocate


def test_what_was_met_first_is_kept_and_what_differs_is_told() -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    sums, expected = BlockSums.unknown(20), dict[int, int]()
    for _ in range(60):
        blocks = rng.integers(0, 20, rng.integers(0, 6))
        found = rng.integers(0, 1 << 64, len(blocks), dtype=np.uint64)
        known = [expected.get(int(block)) for block in blocks]
        again = rng.random(len(blocks)) < 0.5  # the same bytes once more
        found = np.array(
            [
                k if a and k is not None else int(f)
                for k, a, f in zip(known, again, found, strict=True)
            ],
            dtype=np.uint64,
        )
        distinct = dict(zip(blocks.tolist(), found.tolist(), strict=True))
        before = dict(expected)
        changed = sums.meet(blocks, found)
        for block, value in distinct.items():
            expected.setdefault(block, value)
        pairs = zip(blocks.tolist(), found.tolist(), strict=True)
        for position, (block, value) in enumerate(pairs):
            assert (position in changed) == (expected[block] != value), (seed, before)
        everything = np.arange(20)
        assert sums.missing(everything).tolist() == [b for b in range(20) if b not in expected]
        assert {b: int(sums.values[b]) for b in range(20) if sums.known[b]} == expected, seed
    half = sums.of(np.arange(0, 20, 2))
    assert half.values.tolist() == sums.values[::2].tolist()
    assert BlockSums.told([1 << 63, 5]).complete


def test_a_block_may_be_copied_to_two_places_at_once() -> None:
    nbytes = 5000
    with ExitStack() as stack:
        pool = Pool(stack)
        client, keys = pool.store.client, [secrets.token_bytes(16) for _ in range(2)]
        values = [secrets.token_bytes(nbytes) for _ in keys]
        assert set(pool.store.put_batch(keys, values)) == {PutOutcome.STORED}
        memory = allocate(4 * nbytes)
        stack.callback(memory.close)
        region = pool.store.register(memory)
        hit = client.lookup(keys)
        places = np.arange(4) * nbytes
        lengths = np.full(4, nbytes, dtype=np.int64)
        pieces = Pieces.of_blocks(region, places, lengths).naming(np.array([0, 0, 1, 1]))
        copied = client.copy(hit, pieces)
        client.release(hit)
        assert copied.num_good == 2
        assert not copied.bad
        assert region.array.tobytes() == values[0] * 2 + values[1] * 2
