"""Blocks are copied with their checksums: what is stored is what its checksum says."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvstore import Pin, PutOptions, PutOutcome, RegionPiece, copying
from kvstore.client import block_writer
from kvstore.copying import WRITE_STREAM_BYTES_MIN
from tests.support.store_pool import Pool
from transfer import allocate

NBYTES = WRITE_STREAM_BYTES_MIN // 2
SPACE = 4 * WRITE_STREAM_BYTES_MIN


class Scene:
    """A pool whose segment is mapped, two values, and a copy that changes the second one first."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = Pool(stack, segment_bytes=SPACE)
        memory = allocate(2 * NBYTES)
        stack.callback(memory.close)
        self.region = self.pool.store.register(memory)
        self.region.array[:] = np.frombuffer(secrets.token_bytes(2 * NBYTES), dtype=np.uint8)
        self.pieces = [RegionPiece(self.region, i * NBYTES, NBYTES) for i in range(2)]
        self.fired = 0
        assert self.pool.store.put("first use maps", b"x" * 1000) is PutOutcome.STORED
        monkeypatch.setattr(block_writer, "copy_and_sum", self._disturbed)

    def _disturbed(self, target: Any, source: Any, *columns: Any, **how: Any) -> Any:
        source[NBYTES + 7] ^= 1
        self.fired += 1
        return copying.copy_and_sum(target, source, *columns, **how)

    def nothing_left(self) -> bool:
        statistics = self.pool.store.client.master_statistics()
        return statistics.open_puts == 0 == statistics.quarantined_bytes


def test_a_block_that_changes_after_its_checksum_was_told_is_not_stored(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(stack, monkeypatch)
    store, region = scene.pool.store, scene.region
    options = PutOptions(pin=Pin.SOFT)  # pins may concern what exists: checksums are told first
    outcomes = store.put_batch(["quiet", "restless"], scene.pieces, options=options)
    assert scene.fired == 1
    assert outcomes == (PutOutcome.STORED, PutOutcome.FAILED)
    monkeypatch.undo()
    assert store.get("quiet") == region.array[:NBYTES].tobytes()
    assert store.get("restless") is None
    assert store.put("restless", scene.pieces[1]) is PutOutcome.STORED
    assert store.get("restless") == region.array[NBYTES:].tobytes()
    assert scene.nothing_left()


def test_a_block_that_changes_before_it_is_copied_is_stored_as_it_was_copied(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(stack, monkeypatch)
    store, region = scene.pool.store, scene.region
    outcomes = store.put_batch(["quiet", "restless"], scene.pieces)
    assert scene.fired == 1
    assert outcomes == (PutOutcome.STORED, PutOutcome.STORED)
    monkeypatch.undo()
    assert store.get("quiet") == region.array[:NBYTES].tobytes()
    assert store.get("restless") == region.array[NBYTES:].tobytes()
    region.array[NBYTES + 7] ^= 1
    again = store.put_batch(["quiet", "restless"], scene.pieces)
    assert again == (PutOutcome.EXISTS, PutOutcome.CONFLICT)  # by their checksums, not their names
    region.array[NBYTES + 7] ^= 1
    assert set(store.put_batch(["quiet", "restless"], scene.pieces)) == {PutOutcome.EXISTS}
    assert scene.nothing_left()
