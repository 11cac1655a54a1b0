"""Large blocks are copied with their checksums: what changes while it is put is not stored."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvstore import PutOutcome, RegionPiece, copying
from kvstore.client import block_writer
from kvstore.copying import WRITE_STREAM_BYTES_MIN
from tests.support.store_pool import Pool
from transfer import allocate

NBYTES = WRITE_STREAM_BYTES_MIN // 2
SPACE = 4 * WRITE_STREAM_BYTES_MIN


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_block_that_changes_while_it_is_put_is_not_stored(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(stack, segment_bytes=SPACE)
    memory = allocate(2 * NBYTES)
    stack.callback(memory.close)
    region = pool.store.register(memory)
    region.array[:] = np.frombuffer(secrets.token_bytes(2 * NBYTES), dtype=np.uint8)
    pieces = [RegionPiece(region, i * NBYTES, NBYTES) for i in range(2)]
    copy, fired = copying.copy_with_checksums, []

    def disturbed(target: Any, source: Any, *columns: Any, **how: Any) -> list[int]:
        source[NBYTES + 7] ^= 1
        fired.append(True)
        return copy(target, source, *columns, **how)

    assert pool.store.put("first use maps the memory", b"x" * 1000) is PutOutcome.STORED
    monkeypatch.setattr(block_writer, "copy_with_checksums", disturbed)
    outcomes = pool.store.put_batch(["quiet", "restless"], pieces)
    assert fired
    assert outcomes == (PutOutcome.STORED, PutOutcome.FAILED)
    monkeypatch.undo()
    assert pool.store.get("quiet") == region.array[:NBYTES].tobytes()
    assert pool.store.get("restless") is None
    assert pool.store.put("restless", pieces[1]) is PutOutcome.STORED
    assert pool.store.get("restless") == region.array[NBYTES:].tobytes()
    statistics = pool.store.client.master_statistics()
    assert statistics.open_puts == 0
    assert statistics.quarantined_bytes == 0
