"""Copies that a master orders, between nodes and within one; the master is a stub."""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

from kvstore.node.copy_batches import COPIES_MAX, batches_of, block_of, payload_bytes
from kvstore.node.copy_work import CopyWork
from kvstore.node.indexed_block import IndexedBlock
from kvstore.wire import messages as m
from tests.support.disk_calls import in_python
from tests.support.lending_node import LendingNode, damage, read, three_media
from tests.support.ordering_master import OrderingMaster
from transfer import PeerLost, TransferTimeout

SIZE = 1 << 20
WAIT_S = 30.0


@pytest.fixture
def master(stack):
    return stack.enter_context(OrderingMaster(b"s"))


def two_nodes(stack, master, tmp_path, nbytes=SIZE, **knobs):
    return [
        LendingNode(stack, master.address, b"s", three_media(tmp_path / str(i), nbytes), **knobs)
        for i in range(2)
    ]


def to(order, target, offset):
    return msgspec.structs.replace(order, target=target, target_offset=offset)


def wait_recorded(segment, keys):
    """Notes travel by themselves."""
    deadline = time.monotonic() + WAIT_S
    while not set(keys) <= set(segment.held().keys):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("copy_bytes", [1 << 20, 16 << 20])
def test_between_all_media_of_two_nodes(tmp_path, stack, master, copy_bytes):
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    first, second = two_nodes(stack, master, tmp_path, 24 << 20, copy_bytes=copy_bytes)
    orders, places = [], {(n.name, s): 16 << 20 for n in (first, second) for s in range(3)}
    at = [0, 0, 0]
    for source in range(3):
        for target in [first.address(s) for s in range(3) if s != source] + [
            second.address(s) for s in range(3)
        ]:
            for i in range(4):
                nbytes = rng.choice([1, 100, 4096, 100_000, 1_200_000 if i == 3 else 70_000])
                chunk = rng.choice([0, 0, 1000, 65_536])
                labels = {"tenants": "t", "groups": "g", "pinned": i == 2}
                order = first.put(source, at[source], nbytes, chunk_bytes=chunk, **labels)
                at[source] += order.nbytes + rng.randrange(100)
                place = places[target.node, target.segment]
                orders.append(to(order, target, place))
                places[target.node, target.segment] += order.nbytes
    master.order(first.name, orders)
    master.wait_ended(len(orders))
    assert sorted(master.done) == sorted(order.copy_id for order in orders), seed
    for order in orders:
        node = first if order.target.node == first.name else second
        target, source = node.segment(order.target.segment), first.segment(order.source_segment)
        assert np.array_equal(
            read(target, order.target_offset, order.nbytes),
            read(source, order.source_offset, order.nbytes),
        ), seed
        wait_recorded(target, [order.key])
        block = target.index.at(order.target_offset)
        known = source.index.at(order.source_offset)
        assert (block.key, block.nbytes, block.checksum) == (
            order.key,
            order.nbytes,
            order.checksum,
        )
        assert (block.tenant, block.group, block.pinned) == ("t", "g", known.pinned)
    figures = first.node.statistics().copies
    assert (figures.done, figures.failed, figures.doubtful) == (len(orders), 0, 0)


@pytest.mark.parametrize("source", [0, 1])
def test_corrupt_bytes_are_not_sent(tmp_path, stack, master, source):
    first, second = two_nodes(stack, master, tmp_path)
    orders = [
        to(first.put(source, 50_000 * i, 40_000), second.address(0), 50_000 * i) for i in range(5)
    ]
    damage(first.segment(source), 50_000 * 2 + 39_999)
    master.order(first.name, orders)
    master.wait_ended(5)
    assert master.corrupt == [orders[2].copy_id]
    assert sorted(master.done) == sorted(o.copy_id for o in orders if o is not orders[2])
    assert not read(second.segment(0), 100_000, 40_000).any()
    assert orders[2].key not in first.segment(source).held().keys
    wait_recorded(second.segment(0), [o.key for o in orders if o is not orders[2]])


def test_a_disk_that_does_not_give_one_block(tmp_path, stack, master, monkeypatch):
    """What can be read is copied all the same."""
    first, second = two_nodes(stack, master, tmp_path)
    orders = [to(first.put(1, 65_536 * i, 60_000), second.address(0), i << 16) for i in range(4)]
    preadv, failures = os.preadv, []

    def failing(fd, places, offset):
        if offset <= 65_536 * 2 + 5000 < offset + sum(p.nbytes for p in places):
            failures.append(offset)
            raise OSError(5, "Input/output error")
        return preadv(fd, places, offset)

    in_python(monkeypatch)
    monkeypatch.setattr(os, "preadv", failing)
    master.order(first.name, orders)
    master.wait_ended(4)
    assert failures
    assert master.corrupt == [orders[2].copy_id]
    for order in (orders[0], orders[1], orders[3]):
        found = read(second.segment(0), order.target_offset, order.nbytes)
        assert np.array_equal(found, read(first.segment(1), order.source_offset, order.nbytes))


def test_orders_that_cannot_be_carried_out(tmp_path, stack, master):
    first, second = two_nodes(stack, master, tmp_path)
    good = to(first.put(0, 0, 1000), second.address(0), 0)
    change = msgspec.structs.replace
    nobody = m.NodeAddress("nobody", "127.0.0.1:9", 0)
    impostor = m.NodeAddress("nobody", second.engine.address, 0)
    bad = [
        change(good, copy_id=1, source_segment=7),
        change(good, copy_id=2, source_offset=SIZE - 10),
        change(good, copy_id=3, nbytes=0),
        change(good, copy_id=4, nbytes=1009, chunk_bytes=1000),
        change(good, copy_id=5, target_offset=SIZE - 10),
        change(good, copy_id=6, target=nobody),
        change(good, copy_id=7, target=impostor),
        change(good, copy_id=8, target=m.NodeAddress(first.name, "", 9)),
        change(good, copy_id=9, source_offset=-5),
    ]
    master.order(first.name, [*bad, good])
    master.wait_ended(len(bad) + 1)
    assert master.done == [good.copy_id]
    assert sorted(master.failed) == list(range(1, 10))


def test_a_segment_that_is_not_offered(tmp_path, stack, master):
    first, second = two_nodes(stack, master, tmp_path, open_put_s=1.0)
    order = to(first.put(0, 0, 1000), second.address(0), 0)
    missing = m.NodeAddress(second.name, second.engine.address, 5)
    master.order(first.name, [msgspec.structs.replace(order, target=missing)])
    master.wait_ended(1)
    assert master.failed == [order.copy_id]


def test_a_client_on_the_same_engine_keeps_its_key(tmp_path, stack, master):
    first, second = two_nodes(stack, master, tmp_path)
    client_key = second.node.offer_to(first.name, 0)
    order = to(first.put(0, 0, 1000), second.address(0), 5000)
    master.order(first.name, [order])
    master.wait_ended(1)
    first.engine.write(second.name, first.segment(0).region, client_key, 0, 9000, 1000).wait()
    assert np.array_equal(read(second.segment(0), 5000, 1000), read(second.segment(0), 9000, 1000))


def test_a_report_that_is_not_taken_is_told_again(tmp_path, stack, master):
    first, second = two_nodes(stack, master, tmp_path, request_timeout_s=0.5)
    order = to(first.put(0, 0, 1000), second.address(0), 0)
    make = CopyWork.make

    def then_deaf(self, batch, deadline_s):
        master.deaf = True
        return make(self, batch, deadline_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyWork, "make", then_deaf)
        master.order(first.name, [order])
        wait_recorded(second.segment(0), [order.key])
        time.sleep(0.7)
    assert master.done == []
    master.deaf = False
    master.wait_ended(1)
    assert master.done == [order.copy_id]


def test_close_reports_what_was_done(tmp_path, stack, master):
    """The batch under way ends, what was not begun is left to the master."""
    with ExitStack() as inner:
        (first,) = [LendingNode(inner, master.address, b"s", three_media(tmp_path / "a", SIZE))]
        orders = [to(first.put(0, i << 14, 1 << 14), first.address(1), i << 14) for i in range(32)]
        make, begun = CopyWork.make, threading.Event()

        def slow(self, batch, deadline_s):
            begun.set()
            first.node._copier._closing.wait(WAIT_S)
            return make(self, batch, deadline_s)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CopyWork, "make", slow)
            master.order(first.name, orders)
            assert begun.wait(WAIT_S)
            first.node._copier.close()
    assert sorted(master.done) == sorted(order.copy_id for order in orders)


def test_a_write_in_doubt_is_not_reported(tmp_path, stack, master, monkeypatch):
    """Its bytes may still land, so its place must stay closed until the master's deadline."""
    first, second = two_nodes(stack, master, tmp_path)

    class Lost:
        def wait(self):
            raise PeerLost(second.name, "the cable")

    doubtful = [to(first.put(0, i * 2000, 1000), second.address(0), i * 2000) for i in range(2)]
    monkeypatch.setattr(first.engine, "write", lambda *args, **options: Lost())
    master.order(first.name, doubtful)
    deadline = time.monotonic() + WAIT_S
    while first.node.statistics().copies.doubtful < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.undo()
    write = first.segment(1).memory.write

    def late(*args):
        write(*args)
        raise TransferTimeout("slab", "write")

    monkeypatch.setattr(first.segment(1).memory, "write", late)
    late_order = to(first.put(0, 8000, 1000), first.address(1), 0)
    master.order(first.name, [late_order])
    while first.node.statistics().copies.doubtful < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.undo()
    last = to(first.put(0, 12_000, 1000), second.address(0), 4000)
    master.order(first.name, [last])
    master.wait_ended(1)
    assert (master.done, master.failed, master.corrupt) == ([last.copy_id], [], [])


def test_batches_are_bounded_and_complete():
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    targets = [m.NodeAddress(f"n{i}", "", i) for i in range(3)]
    copies = [
        m.Copy(i, rng.randbytes(16), rng.choice([1, 5000, 300_000, 2_000_000]), 0, 0,
               rng.randrange(2), 0, rng.choice(targets), 0)
        for i in range(900)
    ]  # fmt: skip
    found = []
    for batch in batches_of(copies, SIZE):
        assert {(c.source_segment, c.target) for c in batch.copies} == {
            (batch.source, batch.target)
        }
        assert len(batch.copies) == 1 or batch.nbytes <= SIZE
        assert len(batch.copies) <= COPIES_MAX
        places, end = batch.places(), 0
        for place, copy in zip(places, batch.copies, strict=True):
            assert place >= end
            assert place % 4096 == 0
            end = place + copy.nbytes
        assert len(batch.copies) == 1 or end <= SIZE
        found += batch.copies
    assert sorted(found, key=lambda c: c.copy_id) == copies, seed


def test_the_payload_follows_from_the_whole():
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    for _ in range(2000):
        chunk = rng.choice([0, 1, 2, 7, 8, 9, 100, 4096])
        block = IndexedBlock(
            offset=0, length=rng.randint(1, 5000), key=b"k" * 16, checksum=3, chunk_bytes=chunk
        )
        copy = m.Copy(0, block.key, block.nbytes, 3, chunk, 0, 0, m.NodeAddress("", ""), 0)
        assert payload_bytes(copy) == block.length, (seed, block)
        assert block_of(copy, None).nbytes == block.nbytes
