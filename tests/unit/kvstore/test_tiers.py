"""A node with segments of several media, a real master and a client: in one process."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from kvstore import PutOutcome
from kvstore.client.put_options import PutOptions
from kvstore.wire.messages import Medium
from tests.support.disk_calls import in_python
from tests.support.lending_node import damage, three_media
from tests.support.pool_member import start_pool
from tests.support.waits import eventually

SIZE = 1 << 20
BLOCK = 10_000


def keys_of(number):
    return [secrets.token_bytes(16) for _ in range(number)]


def wait_held(member, number, count):
    eventually(lambda: len(member.node.segments[number].held().keys) >= count)


@pytest.mark.parametrize("chunk_bytes", [0, 1000])
def test_blocks_go_where_they_are_wanted_and_come_back(tmp_path, stack, chunk_bytes):
    master, (member,) = start_pool(
        stack, members=1, nbytes=1 << 17, segments=three_media(tmp_path, SIZE)
    )
    written, offsets = {}, np.arange(6) * BLOCK
    for number, medium in enumerate((Medium.DRAM, Medium.SSD, Medium.CXL)):
        member.bytes.random_()
        keys = keys_of(6)
        options = PutOptions(media=(medium,), chunk_bytes=chunk_bytes)
        outcomes = member.client.put(keys, member.region, offsets, BLOCK, options=options)
        assert set(outcomes) == {PutOutcome.STORED}
        wait_held(member, number, 6)
        held = member.node.segments[number].held()
        assert sorted(held.keys) == sorted(keys)
        if medium is Medium.SSD:
            assert all(offset % 4096 == 0 for offset in held.offsets)
        written[medium] = keys, member.bytes.clone()
    for keys, content in written.values():
        member.bytes.zero_()
        hit = member.client.lookup_prefix(keys)
        assert member.client.get_into(hit, member.region, offsets) == 6
        member.client.release(hit)
        assert bytes(member.bytes[: 6 * BLOCK]) == bytes(content[: 6 * BLOCK])
    master.check_invariants()


def test_a_restarted_node_brings_its_disk_back_to_the_same_master(tmp_path, stack):
    knobs = {"segments": three_media(tmp_path, SIZE), "heartbeat_s": 0.1}
    keys = keys_of(5)
    with ExitStack() as inner:
        _, (member,) = start_pool(inner, members=1, nbytes=1 << 17, **knobs)
        options = PutOptions(media=(Medium.SSD,))
        content = member.bytes.clone()
        member.client.put(keys, member.region, np.arange(5) * BLOCK, BLOCK, options=options)
        wait_held(member, 1, 5)
    master, (member,) = start_pool(stack, members=1, nbytes=1 << 17, **knobs)
    hit = member.client.lookup_prefix(keys)
    assert member.client.get_into(hit, member.region, np.arange(5) * BLOCK) == 5
    assert bytes(member.bytes[: 5 * BLOCK]) == bytes(content[: 5 * BLOCK])
    member.client.release(hit)
    master.check_invariants()


def disk_pool(stack, tmp_path, count, nbytes):
    segment = {"medium": "ssd", "bytes": 16 << 20, "path": tmp_path / "slab", "threads": 2}
    knobs = {"segments": [segment], "scrub": {"enabled": False}}
    master, (member,) = start_pool(stack, members=1, nbytes=2 * count * nbytes, **knobs)
    keys = keys_of(count)
    offsets = np.arange(count) * nbytes
    assert set(member.client.put(keys, member.region, offsets, nbytes)) == {PutOutcome.STORED}
    wait_held(member, 0, count)
    return master, member, keys, offsets + count * nbytes


@pytest.mark.parametrize("nbytes", [1 << 20, 700_001, 3 << 20])
def test_many_blocks_of_a_disk_come_a_few_at_a_time(tmp_path, stack, nbytes):
    count = (15 << 20) // nbytes
    _, member, keys, targets = disk_pool(stack, tmp_path, count, nbytes)
    hit = member.client.lookup_prefix(keys)
    assert member.client.get_into(hit, member.region, targets) == count
    member.client.release(hit)
    assert torch.equal(member.bytes[: count * nbytes], member.bytes[count * nbytes :])


def test_a_damaged_one_among_them_is_found(tmp_path, stack):
    _, member, keys, targets = disk_pool(stack, tmp_path, 15, 1 << 20)
    (block,) = [b for b in member.node.segments[0].index.blocks() if b.key == keys[9]]
    damage(member.node.segments[0], block.offset + 5000)
    hit = member.client.lookup_prefix(keys)
    assert member.client.get_into(hit, member.region, targets) == 9
    member.client.release(hit)
    assert list(member.client.exists(keys)).count(False) == 1


def test_a_disk_that_fails_in_the_middle(tmp_path, stack, monkeypatch):
    """Nothing is under way any more when the caller is told."""
    _, member, keys, targets = disk_pool(stack, tmp_path, 15, 1 << 20)
    preadv, calls = os.preadv, []

    def failing(fd, places, offset):
        calls.append(offset)
        if len(calls) > 6:
            raise OSError(5, "Input/output error")
        return preadv(fd, places, offset)

    in_python(monkeypatch)
    monkeypatch.setattr(os, "preadv", failing)
    hit = member.client.lookup_prefix(keys)
    assert member.client.get_into(hit, member.region, targets) == 0
    member.client.release(hit)
    assert len(calls) > 6
    monkeypatch.undo()
    eventually(lambda: member.node.segments[0].memory._slab._queue.num_alive == 0)
