"""What clients tell nodes of their puts, for tests: which notes are sent, and that none is lost."""

from __future__ import annotations

import secrets

from kvstore import MasterServer, MasterUnavailable, PutOutcome
from kvstore.wire.peer_messages import TO_NODE, Unwritten, Written, decode_to_node
from tests.support.waits import eventually

STORED = PutOutcome.STORED
SIZE = 4096


def sent_notes(store, monkeypatch):
    """The notes about blocks that a store sends from now on."""
    engine, sent = store.client.core.engine, []
    notify = engine.notify

    def count(peer, payload):
        if payload.startswith(TO_NODE) and isinstance(decode_to_node(payload), Written | Unwritten):
            sent.append(decode_to_node(payload))
        notify(peer, payload)

    monkeypatch.setattr(engine, "notify", count)
    return sent


def fill(store, number=8):
    """Put values until puts of this size are quick; return them by key."""
    values = {secrets.token_bytes(16): secrets.token_bytes(SIZE) for _ in range(number)}
    assert {store.put(key, data) for key, data in values.items()} == {STORED}
    return values


def fill_in_both_ways(stores):
    """One by one, and in batches."""
    values = {}
    for store in stores:
        values |= fill(store)
        many = [secrets.token_bytes(16) for _ in range(5)]
        bodies = [secrets.token_bytes(SIZE) for _ in many]
        assert set(store.put_batch(many, bodies)) == {STORED}
        values |= dict(zip(many, bodies, strict=True))
    return values


def restart(pool, masters):
    """Put an empty master in the place of the only one, told by the nodes of what there is."""
    port = int(pool.master.address.rpartition(":")[2])
    pool.master.close()
    pool.master = masters.enter_context(MasterServer(pool.config, secret=pool.secret, port=port))
    pool.masters[:] = [pool.master]
    eventually(lambda: pool.master.statistics().nodes == len(pool.nodes), "nodes register again")
    eventually(lambda: answers(pool.store), "the store has found the new master")


def answers(store):
    """Whether the master does; a moment after one that was silent it is not asked."""
    try:
        store.exists(bytes(16))
    except MasterUnavailable:
        return False
    return True
