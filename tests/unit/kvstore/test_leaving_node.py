"""A node that is closed: masters that answer hear of it, others are not waited for."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import ExitStack

import pytest

from configs.schema import KVStoreConfig, TransferConfig
from kvstore import MasterServer, StoreNode
from kvstore.node import registration
from kvstore.wire import messages as m
from tests.support.ordering_master import OrderingMaster
from transfer import TransferEngine

WAIT_S = 60.0


class SilentMaster(OrderingMaster):
    """Answers nothing of one kind, until it is told to go on."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self.unheard: type[m.Request] | None = None
        self.waits, self.go_on = threading.Event(), threading.Event()

    def _handle(self, identity: str, payload: bytes) -> bytes:
        if self.unheard is not None and isinstance(m.decode_request(payload), self.unheard):
            self.waits.set()
            self.go_on.wait(10 * WAIT_S)
        return super()._handle(identity, payload)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def opened_node(stack, masters, secret):
    config = KVStoreConfig(segment_bytes=1 << 20, request_timeout_s=10 * WAIT_S, heartbeat_s=0.05)
    engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=secret)
    node = StoreNode(engine, masters, config, secret=secret)
    engine.on_notify(node.on_notify)
    stack.enter_context(engine)
    node.open()
    stack.callback(node.close)
    assert node.wait_registered(WAIT_S)
    return node


@pytest.mark.parametrize("unheard", [m.Heartbeat, m.Leave])
def test_a_master_that_is_silent_is_not_waited_for(stack, monkeypatch, unheard):
    monkeypatch.setattr(registration, "PARTING_S", 0.2)
    secret = secrets.token_bytes(16)
    master = stack.enter_context(SilentMaster(secret))
    node = opened_node(stack, master.address, secret)
    master.unheard = unheard
    stack.callback(master.go_on.set)
    if unheard is m.Heartbeat:
        assert master.waits.wait(WAIT_S)
    started = time.monotonic()
    node.close()
    assert time.monotonic() - started < WAIT_S
    assert master.waits.is_set(), "it was silent in vain"
    assert not node._registration._thread.is_alive()


def test_beside_a_silent_one_the_others_hear_of_it(stack, monkeypatch):
    monkeypatch.setattr(registration, "PARTING_S", 0.5)
    secret = secrets.token_bytes(16)
    silent = stack.enter_context(SilentMaster(secret))
    config = KVStoreConfig(segment_bytes=1 << 20, node_silence_s=10 * WAIT_S)
    master = stack.enter_context(MasterServer(config, secret=secret))
    node = opened_node(stack, [silent.address, master.address], secret)
    assert master.statistics().nodes == 1
    silent.unheard = m.Leave
    stack.callback(silent.go_on.set)
    node.close()
    assert silent.waits.is_set()
    assert master.statistics().nodes == 0
