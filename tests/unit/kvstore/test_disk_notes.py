"""What clients say of a disk lies in memory of its node, and gets into the disk's index in time."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack

import numpy as np
import pytest

from configs.schema import KVStoreConfig, TransferConfig
from kvstore import MasterServer, PutOutcome, StoreClient, mailbox
from kvstore.node import index_keeper
from kvstore.node.index_log import IndexLog
from kvstore.wire.messages import HeldBlocks
from kvstore.wire.peer_messages import TO_NODE, Written, decode_to_node
from tests.support.lending_node import LendingNode
from tests.support.waits import eventually
from transfer import TransferEngine, allocate
from transfer.pieces import make_pieces

SEGMENT_BYTES = 8 << 20
SIZE = 64 << 10
WAIT_S = 30.0

pytestmark = pytest.mark.skipif(not mailbox.is_available(), reason="needs the compiled part")


class Client:
    """One with an engine of its own, and what it has sent to nodes as notes about blocks."""

    def __init__(self, stack, master, secret):
        self.engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=secret)
        config = KVStoreConfig(request_timeout_s=WAIT_S)
        self.client = StoreClient(self.engine, master, config, secret=secret)
        self.engine.on_notify(self.client.on_notify)
        stack.enter_context(self.engine)
        stack.enter_context(self.client)
        memory = allocate(16 * SIZE)
        stack.callback(memory.close)
        self.region = self.engine.register(memory)
        self.bytes = memory.tensor.numpy()
        self.bytes[:] = np.random.default_rng().integers(0, 256, len(self.bytes), dtype=np.uint8)
        self.sent = []
        notify = self.engine.notify

        def count(peer, payload):
            if payload.startswith(TO_NODE) and isinstance(decode_to_node(payload), Written):
                self.sent.append(payload)
            notify(peer, payload)

        self.engine.notify = count

    def put(self, count):
        keys = [secrets.token_bytes(16) for _ in range(count)]
        offsets = np.arange(count) * SIZE
        assert set(self.client.put(keys, self.region, offsets, SIZE)) == {PutOutcome.STORED}
        return keys


class Pool:
    """A master and a node with a disk; `restart` gives it another life."""

    def __init__(self, stack, folder):
        self.secret, self.folder = secrets.token_bytes(16), folder
        config = KVStoreConfig(request_timeout_s=WAIT_S)
        self.master = stack.enter_context(MasterServer(config, secret=self.secret))
        self.lives = stack.enter_context(ExitStack())
        self.restart()

    def restart(self):
        self.lives.close()
        file = {"medium": "ssd", "bytes": SEGMENT_BYTES, "path": self.folder / "slab", "threads": 2}
        self.node = LendingNode(self.lives, self.master.address, self.secret, (file,))
        self.segment = self.node.segment(0)

    def client(self, stack):
        return Client(stack, self.master.address, self.secret)

    def logged(self):
        """The keys of what a node would find that is started now."""
        log = IndexLog(self.folder / "other.index", SEGMENT_BYTES)
        log.path.write_bytes((self.folder / "slab.index").read_bytes())
        assert log.open()
        try:
            return {block.key for block in log.replay()}
        finally:
            log.close()


@pytest.fixture
def pool(tmp_path, stack):
    return Pool(stack, tmp_path)


@pytest.fixture
def nobody_looks(monkeypatch):
    """No thread takes notes by itself."""
    monkeypatch.setattr(index_keeper.IndexKeeper, "_run", lambda self: None)


def test_no_put_wakes_the_node_and_its_log_knows_all_in_time(pool, stack):
    client = pool.client(stack)
    keys = {key for count in (1, 9, 16) for key in client.put(count)}
    assert client.sent == []
    eventually(lambda: pool.logged() == keys, "nobody has looked at the index", timeout_s=WAIT_S)


def test_a_writer_that_takes_its_time_is_heard(pool, stack, monkeypatch):
    """It says what it has written when nobody expects it any more."""
    monkeypatch.setattr(index_keeper, "ATTEND_S", 0.0)
    monkeypatch.setattr(index_keeper, "RETRY_S", 0.2)
    pool.restart()
    client = pool.client(stack)
    tell, late = client.client.core.writing._writer._segments.tell, []

    def later(node, note):
        time.sleep(0.1)
        late.append(note)
        tell(node, note)

    monkeypatch.setattr(client.client.core.writing._writer._segments, "tell", later)
    keys = set(client.put(3))
    assert late
    assert client.sent == []
    eventually(lambda: pool.logged() == keys, "looked at all the same", timeout_s=WAIT_S)


def test_what_lies_there_when_a_node_is_closed_is_kept(nobody_looks, pool, stack):
    with ExitStack() as inner:
        keys = pool.client(inner).put(12)
        assert not pool.logged(), "the fault needs notes that nobody has taken"
        pool.restart()
    assert sorted(block.key for block in pool.segment.index.blocks()) == sorted(keys)


def test_what_a_client_left_that_is_gone_is_kept(nobody_looks, pool, stack):
    with ExitStack() as inner:
        keys = pool.client(inner).put(12)
    assert {block.key for block in pool.segment.index.blocks()} == set(keys)


def test_what_was_said_of_a_place_before_it_is_overwritten_is_not_late(nobody_looks, pool, stack):
    """A node that is killed after the next write began must not offer what was there before."""
    client = pool.client(stack)
    keys = client.put(4)
    assert not pool.logged(), "the fault needs notes that nobody has taken"
    source, deadline = np.zeros(SIZE, dtype=np.uint8), time.monotonic() + WAIT_S
    pool.segment.memory.write(source, make_pieces(0, 0, SIZE), deadline)
    pool.segment.index.flush()
    kept = {block.key: block.offset for block in pool.segment.index.blocks()}
    assert len(kept) == 3
    assert 0 not in kept.values()
    assert pool.logged() == set(kept) < set(keys)


def test_a_note_that_is_sent_comes_behind_what_was_left_before_it(nobody_looks, pool, stack):
    client = pool.client(stack)
    keys = client.put(4)
    fresh = secrets.token_bytes(16)
    held = HeldBlocks([fresh], [0], [SIZE], [1])
    pool.node.node._record(Written(held, 0))
    found = {block.offset: block.key for block in pool.segment.index.blocks()}
    assert found[0] == fresh
    assert set(found.values()) < {fresh, *keys}
    assert len(found) == 4
