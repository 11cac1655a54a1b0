"""Writers that are asked whether they are at rest, and cannot be."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from types import SimpleNamespace

from kvstore import Store
from kvstore.node.rest_questions import Role, Writer
from kvstore.node.settlement import Settlement
from kvstore.wire.messages import Medium
from kvstore.wire.standing import MasterRecord
from tests.support.store_pool import Pool
from tests.support.waits import eventually
from transfer import PeerLost


def test_that_a_writer_cannot_be_asked_is_said_once_for_each_master(caplog):
    caplog.set_level(logging.INFO)
    asked = []

    def notify(name: str, payload: bytes) -> None:
        asked.append(name)
        raise PeerLost(name, "its process has ended")

    engine = SimpleNamespace(name="node", on_peer_lost=lambda call: None, notify=notify)
    writers = [Writer(name, Role.CLIENT, 1) for name in ("one", "other")]
    segment = SimpleNamespace(number=0, medium=Medium.DRAM, writers=lambda: writers)
    settlement = Settlement(engine, [segment], put_s=60.0)
    for _ in range(2):  # masters, one after the other
        caplog.clear()
        settlement.meet(MasterRecord(shard=0), again=True)
        settlement.registered(0, [0])
        asked.clear()
        for _ in range(20):
            settlement.ask()
        assert asked == ["one", "other"] * 20
        said = [record.getMessage().split()[0] for record in caplog.records]
        assert said == ["one", "other"]


def test_clients_that_left_are_forgotten_though_their_process_lives_on():
    with ExitStack() as stack:
        pool = Pool(stack)
        witness = pool.nodes[0]._settlement.witness
        pool.store.put("before", b"value")
        before = set(witness._processes)
        assert before, "nobody is watched"
        seen = set()
        for number in range(5):
            with Store.connect(pool.addresses, config=pool.config, secret=pool.secret) as store:
                store.put(str(number), b"value")
                seen |= set(witness._processes)
        assert len(seen) == len(before) + 5
        eventually(lambda: set(witness._processes) == before, "they are forgotten")
        assert not witness._left
        assert not witness._lost
        assert pool.store.get("3") == b"value"
