"""Checksums of blocks and of their parts, against xxhash over joined bytes."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
import xxhash

from kvstore.checksum import (
    block_checksums,
    joined_checksum,
    lies_right,
    part_table,
    table_bytes,
    table_checksum,
    verify_stored,
)


def random_bytes(number):
    return np.frombuffer(secrets.token_bytes(number), dtype=np.uint8).copy()


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1000, 5000])
def test_a_part_table_has_one_checksum_per_chunk(chunk_bytes):
    payload = random_bytes(1234)
    cuts = np.sort(np.random.default_rng().integers(0, 1235, 5))
    table = part_table(np.split(payload, cuts), chunk_bytes)
    expected = [
        xxhash.xxh3_64_intdigest(payload[start : start + chunk_bytes].tobytes())
        for start in range(0, 1234, chunk_bytes)
    ]
    assert table.view("<u8").tolist() == expected, cuts
    assert len(table) == table_bytes(1234, chunk_bytes)


def test_pieces_count_as_if_they_were_joined():
    payload = random_bytes(999)
    whole = xxhash.xxh3_64_intdigest(payload.tobytes())
    assert joined_checksum([payload[:1], payload[1:700], payload[700:]]) == whole
    assert block_checksums(payload, np.array([0]), np.array([999])) == [whole]
    assert (table_bytes(999, 0), table_bytes(0, 8), table_bytes(9, 8)) == (0, 0, 16)


@pytest.mark.parametrize("chunk_bytes", [0, 100])
def test_any_flipped_bit_is_seen(chunk_bytes):
    payload = random_bytes(1001)
    stored, checksum = payload, xxhash.xxh3_64_intdigest(payload.tobytes())
    if chunk_bytes:
        table = part_table([payload], chunk_bytes)
        stored, checksum = np.concatenate([payload, table]), table_checksum(table)
    assert verify_stored(stored, 1001, checksum, chunk_bytes)
    for place in {0, 999, 1000, len(stored) - 1}:
        damaged = stored.copy()
        damaged[place] ^= 1 << np.random.default_rng().integers(0, 8)
        assert not verify_stored(damaged, 1001, checksum, chunk_bytes), place
    assert not verify_stored(stored, 1001, checksum ^ 1, chunk_bytes)


@pytest.mark.parametrize("chunk_bytes", [0, 1, 240, 241, 1000, 5000])
def test_a_block_is_verified_where_it_lies(chunk_bytes):
    memory = random_bytes(60_000)
    for nbytes in (1, 240, 241, 3000, 4999):
        offset = int(np.random.default_rng().integers(0, 3000))
        payload = memory[offset : offset + nbytes]
        checksum = xxhash.xxh3_64_intdigest(payload.tobytes())
        stored_bytes = nbytes
        if chunk_bytes:
            table = part_table([payload], chunk_bytes)
            memory[offset + nbytes :][: len(table)] = table
            checksum, stored_bytes = table_checksum(table), nbytes + len(table)
            assert len(table) == table_bytes(nbytes, chunk_bytes)
        assert lies_right(memory, offset, nbytes, checksum, chunk_bytes)
        for at in (offset, offset + nbytes - 1, offset + stored_bytes - 1):
            memory[at] ^= 1
            assert not lies_right(memory, offset, nbytes, checksum, chunk_bytes)
            memory[at] ^= 1
        for start in (-1, len(memory) - stored_bytes + 1, len(memory) + 5):
            assert not lies_right(memory, start, nbytes, checksum, chunk_bytes)
