"""The columns of all copies: as they grow, with tenants from the beginning or later."""

from __future__ import annotations

import ctypes
import os
import random
import secrets

import pytest

from kvstore.eviction import RowQueue
from kvstore.master.books.copy_table import HOLES_FROM, CopyTable
from kvstore.master.books.freed_memory import return_freed_memory

HOLE_BYTES = 64 << 10  # always from the heap
HOLES = 512


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_rows_are_as_they_were_when_the_table_has_grown() -> None:
    rng = random.Random(secrets.randbits(64))
    table, expected = CopyTable(), {}
    while len(table) <= 2 * HOLES_FROM:  # past where freed memory is returned
        count = rng.randrange(1, 5000)
        keys = [rng.randbytes(16) for _ in range(count)]
        lengths = [rng.randrange(1, 1 << 40) for _ in keys]
        segment, offset, space = rng.randrange(100), rng.randrange(1 << 50), rng.randrange(1 << 30)
        rows = table.take_run(keys, segment, offset, lengths, space)
        for i, row in enumerate(rows):
            assert row not in expected
            expected[row] = (keys[i], segment, offset + i * space, lengths[i], space)
    columns = (table.keys, table.segment, table.offset, table.length, table.space)
    for row, values in expected.items():
        assert tuple(column[row] for column in columns) == values
        assert table.copies(row) == [row]
    assert sorted(expected) == table.rows()


def test_what_only_tenants_need_is_there_from_the_first_tenant_on() -> None:
    table = CopyTable()
    before = [table.take(secrets.token_bytes(16), 0, 0, 1, 64) for _ in range(100)]
    assert not table.tenant_older
    queue = RowQueue(table.tenant_older, table.tenant_newer)
    table.keep_tenants()
    table.keep_tenants()
    grown = len(table.keys)
    after = [table.take(secrets.token_bytes(16), 0, 0, 1, 64) for _ in range(3 * grown)]
    order = before + after
    random.Random(secrets.randbits(64)).shuffle(order)
    queue.extend(order)
    assert list(queue) == order
    assert len(table.tenant_older) == len(table.tenant_newer) == len(table.keys) > grown


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than GNU's"
)
def test_holes_between_what_stays_go_back_to_the_system() -> None:
    blocks = [secrets.token_bytes(HOLE_BYTES) for _ in range(2 * HOLES)]
    kept = blocks[::2]
    sums = [sum(block) for block in kept]
    del blocks
    before = resident_bytes()
    return_freed_memory()
    assert before - resident_bytes() > HOLES * HOLE_BYTES // 2
    assert [sum(block) for block in kept] == sums
