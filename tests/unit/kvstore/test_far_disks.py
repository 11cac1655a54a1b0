"""A client that puts and gets through the disk of another engine of the same host."""

from __future__ import annotations

import os
import secrets
import time

import numpy as np
import pytest
import torch

from configs.schema import KVStoreConfig, TransferConfig
from kvstore import MasterServer, PutOutcome, StoreClient
from kvstore.client import block_writer, paced_read
from kvstore.client.put_options import PutOptions
from kvstore.client.segment_keys import SegmentKeys
from tests.support.disk_calls import in_python, replace
from tests.support.lending_node import LendingNode, damage
from transfer import StorageFailed, TransferEngine, allocate
from transfer.backends import direct_io

SEGMENT_BYTES = 24 << 20
WAIT_S = 30.0


class FarPool:
    """A node that lends a file, and a client with an engine of its own."""

    def __init__(self, stack, tmp_path, nbytes, *, shareable=True):
        self.secret = secret = secrets.token_bytes(16)
        config = KVStoreConfig(request_timeout_s=WAIT_S)
        self.master = stack.enter_context(MasterServer(config, secret=secret))
        file = {"medium": "ssd", "bytes": SEGMENT_BYTES, "path": tmp_path / "slab", "threads": 2}
        self.node = LendingNode(stack, self.master.address, secret, (file,))
        self.engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=secret)
        self.client = StoreClient(self.engine, self.master.address, config, secret=secret)
        self.engine.on_notify(self.client.on_notify)
        stack.enter_context(self.engine)
        stack.enter_context(self.client)
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        if shareable:
            memory = allocate(nbytes)
            stack.callback(memory.close)
        self.region = self.engine.register(memory)
        self.bytes = self.region.tensor
        self.bytes.random_(generator=torch.Generator().manual_seed(secrets.randbits(60)))

    def wait_held(self, count):
        deadline = time.monotonic() + WAIT_S
        while len(self.node.segment(0).index.blocks()) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def filled(stack, tmp_path, nbytes, **options):
    """Put blocks of nearly all of the first half of the memory."""
    count = (15 << 20) // nbytes
    pool = FarPool(stack, tmp_path, 2 * count * nbytes, **options)
    keys = [secrets.token_bytes(16) for _ in range(count)]
    offsets = np.arange(count) * nbytes
    assert set(pool.client.put(keys, pool.region, offsets, nbytes)) == {PutOutcome.STORED}
    pool.wait_held(count)
    return pool, keys, offsets + count * nbytes


@pytest.mark.parametrize("shareable", [True, False], ids=["memory", "tensor"])
@pytest.mark.parametrize("nbytes", [1 << 20, 700_001, 5 << 20, 100_000])
def test_blocks_come_back(tmp_path, stack, nbytes, shareable):
    pool, keys, targets = filled(stack, tmp_path, nbytes, shareable=shareable)
    hit = pool.client.lookup_prefix(keys)
    assert pool.client.get_into(hit, pool.region, targets) == len(keys)
    pool.client.release(hit)
    half = len(pool.bytes) // 2
    assert torch.equal(pool.bytes[:half], pool.bytes[half:])
    pool.master.check_invariants()


def test_sums_are_taken_while_bytes_are_copied(tmp_path, stack, monkeypatch):
    def never(*arguments):
        raise AssertionError("a second pass over the bytes")

    pool, keys, targets = filled(stack, tmp_path, 1 << 20)
    monkeypatch.setattr(paced_read, "block_checksums", never)
    hit = pool.client.lookup_prefix(keys)
    assert pool.client.get_into(hit, pool.region, targets) == len(keys)
    pool.client.release(hit)


@pytest.mark.parametrize("nbytes", [1 << 20, 5 << 20])
def test_a_damaged_one_among_them_is_found(tmp_path, stack, nbytes):
    pool, keys, targets = filled(stack, tmp_path, nbytes)
    bad = len(keys) - 2
    (block,) = [b for b in pool.node.segment(0).index.blocks() if b.key == keys[bad]]
    damage(pool.node.segment(0), block.offset + 5000)
    hit = pool.client.lookup_prefix(keys)
    assert pool.client.get_into(hit, pool.region, targets) == bad
    pool.client.release(hit)
    assert list(pool.client.exists(keys)).count(False) == 1
    assert pool.client.statistics().corrupt_blocks == 1


def test_blocks_with_part_tables(tmp_path, stack):
    pool = FarPool(stack, tmp_path, 8 << 20)
    keys = [secrets.token_bytes(16) for _ in range(4)]
    offsets, options = np.arange(4) << 20, PutOptions(chunk_bytes=10_000)
    outcomes = pool.client.put(keys, pool.region, offsets, 1 << 20, options=options)
    assert set(outcomes) == {PutOutcome.STORED}
    hit = pool.client.lookup_prefix(keys)
    assert pool.client.get_into(hit, pool.region, offsets + (4 << 20)) == 4
    pool.client.release(hit)
    assert torch.equal(pool.bytes[: 4 << 20], pool.bytes[4 << 20 :])


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_in_the_middle(tmp_path, stack, monkeypatch, call):
    pool, keys, targets = filled(stack, tmp_path, 1 << 20)
    plain, calls = getattr(os, call), []

    def failing(fd, places, offset):
        calls.append(offset)
        if len(calls) > 2:
            raise OSError(5, "Input/output error")
        return plain(fd, places, offset)

    in_python(monkeypatch)
    if call == "preadv":
        monkeypatch.setattr(os, call, failing)
        hit = pool.client.lookup_prefix(keys)
        assert pool.client.get_into(hit, pool.region, targets) == 0
        pool.client.release(hit)
    else:
        pool.client.remove(keys)
        monkeypatch.setattr(os, call, failing)
        fresh = [secrets.token_bytes(16) for _ in range(10)]
        outcomes = pool.client.put(fresh, pool.region, np.arange(10) << 20, 1 << 20)
        assert set(outcomes) == {PutOutcome.FAILED}
        assert not any(pool.client.exists(fresh))
    assert len(calls) > 2
    pool.master.check_invariants()


def found_again(client, keys):
    """After a failure a client leaves the node alone for a while."""
    hit = client.lookup_prefix(keys)
    deadline = time.monotonic() + WAIT_S
    while not hit.num_blocks and time.monotonic() < deadline:
        time.sleep(0.1)
        hit = client.lookup_prefix(keys)
    return hit


def told_of(monkeypatch):
    """Return a list that grows by how many blocks the node is told of at a time."""
    told, tell = [], SegmentKeys.tell

    def noted(segments, node, note):
        told.append(len(note.held.keys))
        tell(segments, node, note)

    monkeypatch.setattr(SegmentKeys, "tell", noted)
    return told


@pytest.mark.parametrize("nbytes", [1 << 20, 700_001, 5 << 20, 9 << 20])
def test_what_is_much_is_written_in_portions(tmp_path, stack, monkeypatch, nbytes):
    count = (22 << 20) // nbytes
    pool = FarPool(stack, tmp_path, 2 * count * nbytes)
    told = told_of(monkeypatch)
    keys = [secrets.token_bytes(16) for _ in range(count)]
    offsets = np.arange(count) * nbytes
    assert set(pool.client.put(keys, pool.region, offsets, nbytes)) == {PutOutcome.STORED}
    assert sum(told) == count
    assert len(told) > 1, "of what is there it is told before all is"
    if nbytes < block_writer.FIRST_BYTES:
        assert told[0] * nbytes <= block_writer.FIRST_BYTES, "it begins with a little"
    pool.wait_held(count)
    hit = pool.client.lookup_prefix(keys)
    assert pool.client.get_into(hit, pool.region, offsets + count * nbytes) == count
    pool.client.release(hit)
    half = len(pool.bytes) // 2
    assert torch.equal(pool.bytes[:half], pool.bytes[half:])
    pool.master.check_invariants()


def test_of_a_portion_that_fails_no_other_suffers(tmp_path, stack, monkeypatch):
    count, nbytes = 22, 1 << 20
    pool = FarPool(stack, tmp_path, 2 * count * nbytes)
    told = told_of(monkeypatch)
    plain = direct_io.write_fully

    def write(fd, places, low, *others):
        if any(bytes(place[:64]) == mark for place in places):
            raise StorageFailed("the slab", "write", "Input/output error")
        plain(fd, places, low, *others)

    # Of the first portion that is written: it has the last blocks.
    mark = pool.bytes[20 * nbytes : 20 * nbytes + 64].numpy().tobytes()
    first = count - block_writer.FIRST_BYTES // nbytes
    replace(monkeypatch, write, writes=True)
    keys = [secrets.token_bytes(16) for _ in range(count)]
    offsets = np.arange(count) * nbytes
    outcomes = pool.client.put(keys, pool.region, offsets, nbytes)
    assert outcomes[20] == PutOutcome.FAILED
    stored = [i for i, outcome in enumerate(outcomes) if outcome == PutOutcome.STORED]
    assert stored == list(range(first))
    assert sum(told) >= len(stored)
    hit = found_again(pool.client, keys)
    assert hit.num_blocks == first
    assert pool.client.get_into(hit, pool.region, offsets[:first] + count * nbytes) == first
    pool.client.release(hit)
    assert torch.equal(pool.bytes[: first * nbytes], pool.bytes[count * nbytes :][: first * nbytes])
    pool.master.check_invariants()
