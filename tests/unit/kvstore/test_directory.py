"""Who follows a directory misses no master, whenever it came."""

from __future__ import annotations

import random
import secrets

from configs.schema import KVStoreConfig, TransferConfig
from kvstore import MasterServer, StoreNode
from kvstore.discovery.directory import KnownMasters, StaticMasters
from kvstore.wire.standing import MasterRecord
from transfer import TransferEngine

NOBODY = "127.0.0.1:1"
WAIT_S = 60.0


class Board(KnownMasters):
    def enter(self, record: MasterRecord) -> bool:
        return self._enter(record)


def test_a_node_registers_with_a_master_that_came_before_it_was_open(stack):
    secret = secrets.token_bytes(16)
    config = KVStoreConfig(segment_bytes=1 << 20, heartbeat_s=0.2)
    server = stack.enter_context(MasterServer(config, secret=secret))
    engine = stack.enter_context(TransferEngine(TransferConfig(), name="node", secret=secret))
    directory = StaticMasters([NOBODY])
    node = StoreNode(engine, directory, config, secret=secret)
    directory.move([server.address])
    stack.enter_context(node)
    assert node.wait_registered(WAIT_S)


def test_a_listener_knows_the_latest_of_each_shard():
    board, rng, terms = Board(3), random.Random(), [0, 0, 0]
    listeners: list[dict[int, MasterRecord]] = []
    for step in range(200):
        if rng.random() < 0.1:
            heard: dict[int, MasterRecord] = {}
            listeners.append(heard)
            board.subscribe(lambda record, heard=heard: heard.update({record.shard: record}))
        shard, term = rng.randrange(3), rng.randrange(200)
        entered = board.enter(MasterRecord(shard=shard, address=f"m:{step}", term=term))
        assert entered == (term >= terms[shard])
        terms[shard] = max(terms[shard], term)
        for heard in listeners:
            assert tuple(heard[shard] for shard in range(3)) == board.masters()
    assert [record.term for record in board.masters()] == terms
