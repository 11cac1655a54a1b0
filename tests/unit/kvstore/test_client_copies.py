"""Several copies of a block, and what a client does when one is bad or out of reach."""

from __future__ import annotations

import secrets
import time

import numpy as np
import pytest

from kvstore import (
    BlockCorrupt,
    BlockUnreachable,
    GetOutcome,
    NodeUnreachable,
    PutOptions,
    PutOutcome,
)
from kvstore.wire import messages as m
from tests.support.store_pool import SEGMENT, Pool
from tests.support.waits import eventually

BLOCK = 4096


def places(pool, value):
    """Where a value lies: pairs of a node's number and an offset in its segment."""
    found = []
    for number, node in enumerate(pool.nodes):
        held, at = node.segments[0].region.array[:SEGMENT].tobytes(), -1
        while (at := held.find(value, at + 1)) >= 0:
            found.append((number, at))
    return found


def flip(pool, place):
    number, offset = place
    pool.nodes[number].segments[0].region.array[offset + 100] ^= 1


def cut_off(pool, monkeypatch, number):
    """The store's client cannot reach one node any more."""
    client, name = pool.store.client, pool.nodes[number].name
    read = client.core.engine.read

    def failing(peer, *args, **options):
        if peer == name:
            raise NodeUnreachable(node=name, address="x", problem="cut off")
        return read(peer, *args, **options)

    known = client.segments.known

    def unknown(where):
        return None if where.node == name else known(where)

    get = client.segments.get

    def unreachable(where, *, deadline_s):
        if where.node == name:
            raise NodeUnreachable(node=name, address="x", problem="cut off")
        return get(where, deadline_s=deadline_s)

    monkeypatch.setattr(client.core.engine, "read", failing)
    monkeypatch.setattr(client.segments, "known", unknown)
    monkeypatch.setattr(client.segments, "get", unreachable)


@pytest.mark.parametrize("chunk_bytes", [0, 1000])
def test_copies_lie_on_different_nodes_and_each_will_do(stack, chunk_bytes):
    pool = Pool(stack, nodes=3)
    value = secrets.token_bytes(BLOCK)
    options = PutOptions(replicas=2, chunk_bytes=chunk_bytes)
    assert pool.store.put("name", value, options=options) is PutOutcome.STORED
    found = places(pool, value)
    assert len({number for number, _ in found}) == len(found) == 2
    for _ in range(50):  # whichever the master names
        place = secrets.choice(found)
        flip(pool, place)
        assert pool.store.get_batch(["name"])[0].value == value, "from the other copy"
        flip(pool, place)
        if pool.master.statistics().corrupt_blocks:
            break
    assert pool.master.statistics().corrupt_blocks == 1
    assert pool.store.client.statistics().corrupt_blocks == 1
    pool.master.check_invariants()


def test_fewer_copies_than_asked_for_are_accepted(stack):
    pool = Pool(stack, nodes=2)
    value = secrets.token_bytes(BLOCK)
    assert pool.store.put("name", value, options=PutOptions(replicas=5)) is PutOutcome.STORED
    assert len(places(pool, value)) == 2
    assert pool.store.remove("name")
    eventually(lambda: pool.master.statistics().committed_bytes == 0, "both are gone")


def test_a_block_is_stored_if_one_of_its_copies_is(stack, monkeypatch):
    pool = Pool(stack, nodes=2)
    cut_off(pool, monkeypatch, 0)
    values = {f"name {i}": secrets.token_bytes(BLOCK) for i in range(6)}
    outcomes = pool.store.put_batch(
        list(values), list(values.values()), options=PutOptions(replicas=2)
    )
    assert set(outcomes) == {PutOutcome.STORED}
    assert [r.value for r in pool.store.get_batch(list(values))] == list(values.values())
    assert pool.master.statistics().open_bytes == 0
    pool.master.check_invariants()


def test_a_node_out_of_reach_is_left_for_another_copy(stack, monkeypatch):
    pool = Pool(stack, nodes=2)
    values = {f"name {i}": secrets.token_bytes(BLOCK) for i in range(8)}
    pool.store.put_batch(list(values), list(values.values()), options=PutOptions(replicas=2))
    cut_off(pool, monkeypatch, 1)
    results = pool.store.get_batch(list(values))
    assert [result.value for result in results] == list(values.values())
    assert pool.master.statistics().blocks == 8, "one client's broken link ends nothing"


def test_without_another_copy_it_is_unreachable_and_not_a_miss(stack, monkeypatch):
    pool = Pool(stack, nodes=1)
    value = secrets.token_bytes(BLOCK)
    pool.store.put("name", value)
    cut_off(pool, monkeypatch, 0)
    with pytest.raises(BlockUnreachable) as caught:
        pool.store.get("name")
    assert caught.value.retryable
    monkeypatch.undo()
    # The client avoids the node for a while; another has never heard of it.
    assert pool.connect().get("name") == value
    assert pool.store.client.statistics().unreachable_blocks >= 1


def test_a_block_that_is_bad_everywhere_is_corrupt_once_and_then_a_miss(stack):
    pool = Pool(stack, nodes=2)
    value = secrets.token_bytes(BLOCK)
    pool.store.put_batch(["good", "bad"], [secrets.token_bytes(BLOCK), value],
                         options=PutOptions(replicas=2))  # fmt: skip
    for place in places(pool, value):
        flip(pool, place)
    results = pool.store.get_batch(["good", "bad"])
    assert [r.outcome for r in results] == [GetOutcome.HIT, GetOutcome.CORRUPT]
    assert pool.store.get("bad") is None
    assert pool.store.put("bad", value) is PutOutcome.STORED
    for place in places(pool, value):
        flip(pool, place)
    with pytest.raises(BlockCorrupt):
        pool.store.get("bad")


@pytest.mark.parametrize("chunk_bytes", [0, 512])
def test_a_damaged_part_spoils_only_who_reads_it(stack, chunk_bytes):
    pool = Pool(stack)
    client = pool.store.client
    value = secrets.token_bytes(BLOCK)
    pool.store.put("name", value, options=PutOptions(chunk_bytes=chunk_bytes))
    flip(pool, places(pool, value)[0])  # byte 100
    region = pool.store.register(np_tensor(BLOCK))
    key = pool.store.operations.keys(["name"])
    hit = client.lookup_prefix(key)
    good = client.get_ranges(hit, region, [0], start=1024, nbytes=512)
    assert good == (1 if chunk_bytes else 0)
    if chunk_bytes:
        assert region.array[:512].tobytes() == value[1024:1536]
        assert client.get_ranges(hit, region, [0], start=600, nbytes=10) == 1
        assert region.array[:10].tobytes() == value[600:610]
        assert client.get_ranges(hit, region, [0], start=0, nbytes=10) == 0
    client.release(hit)
    assert pool.store.get("name") is None


def np_tensor(nbytes):
    import torch

    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))


def test_waiting_for_space_ends_when_there_is_some(stack):
    pool = Pool(stack, segment_bytes=1 << 16, lease_s=1.0)
    names = [f"name {i}" for i in range(16)]
    values = [secrets.token_bytes(BLOCK) for _ in names]
    assert set(pool.store.put_batch(names, values)) == {PutOutcome.STORED}
    client = pool.store.client
    hit = client.lookup_prefix(pool.store.operations.keys(names))
    assert hit.num_blocks == 16, "all of the pool is leased now"
    new = secrets.token_bytes(BLOCK)
    assert pool.store.put("new", new) is PutOutcome.NO_SPACE
    started = time.monotonic()
    patient = PutOptions(wait_for_space=True)
    assert pool.store.put("new", new, options=patient, timeout_s=90.0) is PutOutcome.STORED
    assert time.monotonic() - started < 60.0, "soon after the leases had ended"
    hit = client.lookup(pool.store.operations.keys(["new", *names]))
    with client.hold(hit):
        started = time.monotonic()
        assert pool.store.put("newer", secrets.token_bytes(2 * BLOCK), options=patient,
                              timeout_s=0.5) is PutOutcome.NO_SPACE  # fmt: skip
        assert 0.4 < time.monotonic() - started < 60.0, "for as long as was asked"


def test_a_master_that_grants_one_row_per_block_is_understood(stack):
    """Rows are counted from the reply, not from what was asked for."""
    pool = Pool(stack)
    reply = m.Allocated([m.PutOutcome.EXISTS], [], [-1], [-1], 1.0)
    pool.store.client._link.ask = lambda *args, **options: reply
    assert pool.store.put("name", b"x", options=PutOptions(replicas=3)) is PutOutcome.EXISTS
