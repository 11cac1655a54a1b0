"""Clients that are killed or stopped in the middle of puts and gets: nobody else's bytes suffer."""

from __future__ import annotations

import random
import secrets
from contextlib import ExitStack

import pytest

from configs.schema import TransferBackend
from kvstore import MasterServer
from tests.support.busy_client import BusyClient, fresh_batch, value_of
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually

LEASE_S = 1.0
PUT_S = 4.0  # half of it is for writing, on a busy machine too


def check_books(pool, keys):
    """What the master finds lies in its node's index, at its place, with the right bytes there."""
    keys = list(keys)
    nodes = {node.name: node for node in pool.nodes}
    hit = pool.store.client.lookup(keys)
    for row, position in enumerate(hit.positions):
        where, key = hit.nodes[hit.node_idx[row]], keys[position]
        (segment,) = [s for s in nodes[where.node].segments if s.number == where.segment]
        held = {block.key: block for block in segment.index.blocks()}
        offset, nbytes = int(hit.offsets[row]), int(hit.lengths[row])
        assert (held[key].offset, held[key].length) == (offset, nbytes)
        assert segment.memory.array[offset : offset + nbytes].tobytes() == value_of(key)[:nbytes]
    found = {keys[position] for position in hit.positions}
    pool.store.client.release(hit)
    pool.master.check_invariants()
    return found


@pytest.mark.parametrize("backend", [TransferBackend.AUTO, TransferBackend.TCP])
def test_killed_in_the_middle_of_batches_with_leases(stack, backend):
    masters = stack.enter_context(ExitStack())  # closed last: the pool says goodbye to them
    pool = Pool(
        stack, nodes=2, segment_bytes=64 << 20, lease_s=LEASE_S, open_put_s=PUT_S, heartbeat_s=0.1
    )
    port = int(pool.master.address.rpartition(":")[2])
    begun, stored, killed = set(), set(), 0
    for _ in range(3):
        client = BusyClient(pool, backend=backend)
        stack.callback(client.close)
        client.watch(random.uniform(0.1, 0.5), until=lambda: pool.master.statistics().leases > 0)
        client.kill()
        killed += 1
        begun |= client.begun
        stored |= client.stored
        pool.master.fence([client.name])
        pool.master.confirm_dead([client.name])
        figures = pool.master.statistics()
        assert (figures.open_puts, figures.open_bytes, figures.quarantined_bytes) == (0, 0, 0)
    assert killed == 3
    assert stored
    eventually(lambda: pool.master.statistics().leases == 0, "its leases are over")
    found = check_books(pool, begun)
    assert stored <= found <= begun, "all that it heard of is there, and nothing in halves"
    # The next master learns the same from the nodes.
    pool.master.close()
    pool.master = masters.enter_context(MasterServer(pool.config, secret=pool.secret, port=port))
    eventually(lambda: pool.master.statistics().nodes == 2, "the nodes have registered")
    eventually(lambda: stored <= check_books(pool, begun), "all is known again")
    pool.store.remove_batch(list(begun))

    def all_free():
        figures = pool.master.statistics()
        return figures.free_bytes == figures.capacity_bytes

    eventually(all_free, "every byte is free again")


@pytest.mark.parametrize("way", ["short", "batch"])
@pytest.mark.parametrize("fenced", [False, True])
def test_stopped_for_longer_than_its_leases_and_places(stack, way, fenced):
    pool = Pool(stack, segment_bytes=4 << 20, lease_s=LEASE_S, open_put_s=PUT_S, heartbeat_s=0.1)
    client = BusyClient(pool, way=way)
    stack.callback(client.close)
    assert client.recv() == "ready"
    old = {k: value_of(k) for k in (secrets.token_bytes(16) for _ in range(3))}
    eventually(lambda: {"failed"}.isdisjoint(pool.store.put_batch(list(old), list(old.values()))))
    key = secrets.token_bytes(16)
    batch = {key: value_of(key)[:512]} if way == "short" else fresh_batch()
    client.pipe.send(batch)
    client.pipe.send(list(old))
    assert client.recv() == len(old), "it has a lease on them"
    assert client.recv() == "granted", "it is about to write"
    client.stop()
    if fenced:
        pool.master.fence([client.name])
    granted_bytes = sum(map(len, batch.values()))

    def lapsed():
        figures = pool.master.statistics()
        return figures.leases == 0 and figures.quarantined_bytes >= granted_bytes

    eventually(lapsed, "its leases are over, its places are closed")
    # Others use all the room that there is.
    assert pool.store.remove_batch(list(old)) == len(old)
    others = {}
    for _ in range(40):
        fresh = fresh_batch()
        outcomes = pool.store.put_batch(list(fresh), list(fresh.values()))
        others |= {k: v for (k, v), o in zip(fresh.items(), outcomes, strict=True) if o == "stored"}
    figures = pool.master.statistics()
    assert figures.evicted_blocks > 0, "the pool was full"
    assert figures.quarantined_bytes >= granted_bytes, "nobody got its places"
    client.pipe.send("go on")
    client.go_on()
    outcome, got = client.recv(), client.recv()
    if fenced:
        assert outcome == "Fenced"
    else:
        assert set(outcome) <= {"stored", "failed", "no_space"}
    assert got in ("LeaseExpired", "Fenced"), "what it reads now may be somebody else's"
    results = dict(zip(others, pool.store.get_batch(list(others)), strict=True))
    assert {str(result.outcome) for result in results.values()} <= {"hit", "miss"}
    hits = {key: result.value for key, result in results.items() if result.value is not None}
    assert hits
    assert all(value == others[key] for key, value in hits.items())
    if not fenced:
        names = [k for k, o in zip(batch, outcome, strict=True) if o == "stored"]
        for name, result in zip(names, pool.store.get_batch(names), strict=True):
            assert result.value in (None, batch[name])
    client.process.join(WAIT_S)
    pool.master.confirm_dead([client.name])
    assert pool.master.statistics().quarantined_bytes == 0
    pool.master.check_invariants()
