"""Values that lie in no host memory."""

from __future__ import annotations

import secrets

import pytest

from kvstore import InvalidValue, PutOutcome, RegionPiece
from kvstore.client import reserved_places
from tests.support.store_pool import Pool
from transfer.backends.file import FileSlab

STORED = PutOutcome.STORED
SIZE = 4096


def test_what_lies_in_no_host_memory_is_refused_as_on_the_long_way(stack, tmp_path, monkeypatch):
    monkeypatch.setattr(reserved_places, "IDLE_S", 60.0)  # nothing is given back meanwhile
    pool = Pool(stack)
    slab = stack.enter_context(FileSlab(tmp_path / "slab", SIZE))
    region = pool.store.client.core.engine.register(slab)
    stack.callback(pool.store.client.core.engine.release, region)
    for name in ("first", "second"):  # the next of this size would go the short way
        assert pool.store.put(name, secrets.token_bytes(SIZE)) is STORED
    held_bytes = pool.master.statistics().open_bytes
    with pytest.raises(InvalidValue):
        pool.store.put("third", RegionPiece(region, 0, SIZE))
    assert pool.master.statistics().open_bytes == held_bytes, "a place was spoiled"
    assert pool.store.get("third") is None
