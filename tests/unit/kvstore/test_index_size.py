"""The index of a master does not grow where as many blocks go as come."""

from __future__ import annotations

import random
import sys
from collections import deque

import pytest

from kvstore.master.books.block_index import LOOSE_BYTES, PACKED_FROM, BlockIndex
from kvstore.master.books.copy_table import CopyTable


@pytest.mark.parametrize("count", [PACKED_FROM, 50_000, 65_000, 87_000])
def test_an_index_in_which_keys_come_and_go_stays_as_large_as_it_was(count):
    index = BlockIndex(CopyTable())
    model = {random.randbytes(16): row for row in range(count)}
    index.rows.update(model)
    order, packed = deque(model), 0
    for row in range(count, 5 * count):
        gone, key = order.popleft(), random.randbytes(16)
        del index.rows[gone], model[gone]
        index.rows[key] = model[key] = row
        order.append(key)
        before = index.rows
        index.pack()
        packed += before is not index.rows
    assert index.rows == model
    assert sys.getsizeof(index.rows) <= LOOSE_BYTES * count
    assert packed <= 17, "a quarter of the keys can come before it grows again"


def test_a_small_one_is_left_alone():
    index = BlockIndex(CopyTable())
    index.rows.update((random.randbytes(16), row) for row in range(1000))
    for key in list(index.rows)[10:]:
        del index.rows[key]
    before = index.rows
    index.pack()
    assert index.rows is before
