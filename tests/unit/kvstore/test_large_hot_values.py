"""Larger values that are read again and again: into registered memory and any other, both ways."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

import numpy as np
import pytest

from configs.schema import TransferBackend, TransferConfig
from kvstore import BlockCorrupt, PutOutcome, RegionPiece
from tests.support.store_pool import Pool
from transfer import allocate

SIZES = (40_000, (256 << 10) + 1, 1 << 20, (5 << 20) + 77)


@pytest.mark.parametrize("backend", [TransferBackend.AUTO, TransferBackend.TCP])
def test_values_are_right_when_they_are_hot_and_damage_is_found(backend: TransferBackend) -> None:
    with ExitStack() as stack:
        pool = Pool(stack, segment_bytes=16 << 20)
        store = pool.connect(transfer=TransferConfig(backend=backend))
        memory = allocate(SIZES[-1])
        stack.callback(memory.close)
        region = store.register(memory)
        for nbytes in SIZES:
            value, name = secrets.token_bytes(nbytes), f"of {nbytes}"
            assert store.put(name, value) is PutOutcome.STORED
            for _ in range(4):
                assert store.get(name) == value
                assert store.get_into(name, RegionPiece(region, 0, nbytes)) == nbytes
                assert region.array[:nbytes].tobytes() == value
                target = np.zeros(nbytes + 9, dtype=np.uint8)
                assert store.get_into(name, target[3 : 3 + nbytes]) == nbytes
                assert target.tobytes() == bytes(3) + value + bytes(6)
        assert store.client.statistics().hot_blocks > 0
        segment = pool.nodes[0].segments[0].region.array
        at = segment.tobytes().index(value)
        segment[at + 77] ^= 1
        with pytest.raises(BlockCorrupt):
            store.get_into(name, np.zeros(nbytes, dtype=np.uint8))
        assert store.get_into(name, RegionPiece(region, 0, nbytes)) is None
        for nbytes in SIZES[:2]:
            value, name = secrets.token_bytes(nbytes), f"another of {nbytes}"
            assert store.put(name, value) is PutOutcome.STORED
            assert [store.get(name) for _ in range(3)] == [value] * 3
            segment[segment.tobytes().index(value) + nbytes - 1] ^= 1
            with pytest.raises(BlockCorrupt):
                store.get(name)
            assert store.get(name) is None
