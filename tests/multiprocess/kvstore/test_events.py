"""Subscribers in other processes hold what the master holds: from the start, late, slow, again."""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from configs.kv_events import KVEventsConfig
from configs.schema import KVStoreConfig
from kvstore import MasterServer
from kvstore.wire import messages as m
from tests.support.waits import eventually

WAIT_S = 90.0
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "kvstore.md"
ANY_PORTS = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


class Follower:
    """A subscriber process; `await_held` reads its lines."""

    def __init__(self, stack, events, secret, *, topic="kv-events", hwm=1000):
        # What was said before it came it gets by a replay: nothing of that may be on its way.
        eventually(lambda: not events._queue, "what was said before is published")
        module = "tests.support.event_subscriber"
        endpoints = (events.endpoint, events.replay_endpoint)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *endpoints, secret, topic, str(hwm)],
            stdout=subprocess.PIPE,
        )
        stack.callback(self.end)
        self._lines = selectors.DefaultSelector()
        self._lines.register(self.process.stdout, selectors.EVENT_READ)
        os.set_blocking(self.process.stdout.fileno(), False)
        self._rest = b""
        self.last = {}

    def await_held(self, expected, *, wait_s=WAIT_S):
        """Read until the newest state is `expected`; return its line."""
        deadline = time.monotonic() + wait_s
        wanted = sorted(f"CPU:{key.hex()}" for key in expected)
        while self.last.get("held") != wanted:
            left = deadline - time.monotonic()
            assert left > 0, (len(wanted), self.last)
            if self._lines.select(left):
                data = self.process.stdout.read()
                assert data != b"", "the subscriber ended"
                *lines, self._rest = (self._rest + (data or b"")).split(b"\n")
                if lines:
                    self.last = json.loads(lines[-1])
        return self.last

    def end(self):
        self.process.kill()
        self.process.wait()
        self._lines.close()
        self.process.stdout.close()


class Pool:
    """A master with one node that holds what the test says."""

    def __init__(self, stack, secret, **knobs):
        events = KVEventsConfig(enabled=True, **{**ANY_PORTS, **knobs})
        self.server = MasterServer(KVStoreConfig(events=events), secret=secret)
        self._stack = ExitStack()
        stack.enter_context(self._stack)
        self._stack.enter_context(self.server)
        self.batch = 0

    def ask(self, request):
        return self.server._step(request)

    def register(self, node, keys):
        n = len(keys)
        columns = (keys, [64 * i for i in range(n)], [64] * n, [1] * n, [False] * n)
        request = m.Register(node, f"{node}:1", max(n, 1) * 64 + 4096, True, m.HeldBlocks(*columns))
        assert self.ask(request) == m.Registered(adopted=n)

    def put(self, key):
        self.batch += 1
        self.ask(m.Allocate("writer", self.batch, [key], [64], [1]))
        assert self.ask(m.Finish("writer", self.batch, [0])).stored == [True]

    def close(self):
        self._stack.close()


def fresh(number):
    return [secrets.token_bytes(16) for _ in range(number)]


@pytest.mark.parametrize(("security", "form"), [("curve", "array"), ("plain", "map")])
def test_a_subscriber_holds_what_the_master_holds(stack, security, form):
    secret = secrets.token_bytes(32)
    pool = Pool(stack, secret, security=security, form=form)
    held = fresh(9000)  # more than a batch takes
    pool.register("a", held)
    told = secret.hex() if security == "curve" else "-"
    early = Follower(stack, pool.server.events, told)
    first = early.await_held(held)
    assert first["replays"] == 1, "it was late, and got what it had missed"
    pool.put(new := secrets.token_bytes(16))
    early.await_held([*held, new])
    pool.ask(m.Remove(held[:100]))
    early.await_held([*held[100:], new])
    pool.ask(m.Leave("a"))
    early.await_held([])


def test_who_is_no_member_gets_nothing(stack):
    secret = secrets.token_bytes(32)
    pool = Pool(stack, secret)
    pool.register("a", held := fresh(3))
    context = zmq.Context()
    stack.callback(context.term)
    replay = context.socket(zmq.DEALER)
    stack.callback(replay.close, linger=0)
    replay.connect(pool.server.events.replay_endpoint)
    replay.send_multipart([b"", bytes(8)])
    Follower(stack, pool.server.events, secret.hex()).await_held(held)
    assert not replay.poll(200)


def test_a_stopped_subscriber_finds_the_gap_and_gets_the_rest(stack):
    secret = secrets.token_bytes(32)
    pool = Pool(stack, secret, hwm_batches=2, buffer_batches=50)
    pool.register("a", [])
    slow = Follower(stack, pool.server.events, secret.hex(), hwm=2)
    slow.await_held([])
    os.kill(slow.process.pid, signal.SIGSTOP)
    # Far more than the queues and the socket buffers of both ends hold.
    waves = [fresh(4000) for _ in range(150)]
    started = time.monotonic()
    for i, keys in enumerate(waves):
        pool.register(f"b{i}", keys)
        if i:
            pool.ask(m.Leave(f"b{i - 1}"))
    assert time.monotonic() - started < WAIT_S
    os.kill(slow.process.pid, signal.SIGCONT)
    deadline = time.monotonic() + WAIT_S
    expected = set(waves[-1])
    while True:  # a gap shows with the message after it
        pool.ask(m.Leave("a"))
        pool.register("a", [key := secrets.token_bytes(16)])
        try:
            line = slow.await_held([*expected, key], wait_s=2.0)
            break
        except AssertionError:
            assert time.monotonic() < deadline
    assert line["replays"] > 1, "nothing was lost: the test did not fill the queues"


def test_a_new_master_is_followed_without_what_the_old_one_said(stack):
    secret = secrets.token_bytes(32)
    pool = Pool(stack, secret)
    pool.register("a", old := fresh(20))
    follower = Follower(stack, pool.server.events, secret.hex())
    before = follower.await_held(old)
    ports = {
        "endpoint": pool.server.events.endpoint,
        "replay_endpoint": pool.server.events.replay_endpoint,
    }
    pool.close()
    new = Pool(stack, secret, **ports)
    new.register("a", old[:5])  # told while the subscriber is not connected yet
    deadline = time.monotonic() + WAIT_S
    while True:
        new.put(key := secrets.token_bytes(16))
        new.ask(m.Remove([key]))
        try:
            after = follower.await_held(old[:5], wait_s=2.0)
            break
        except AssertionError:
            assert time.monotonic() < deadline
    assert after["last"] > before["last"]
    assert after["replays"] > before["replays"]


def test_a_replay_request_that_is_none_is_dropped(stack):
    pool = Pool(stack, b"s", security="plain")
    pool.register("a", held := fresh(2))
    context = zmq.Context()
    stack.callback(context.term)
    replay = context.socket(zmq.DEALER)
    stack.callback(replay.close, linger=0)
    replay.connect(pool.server.events.replay_endpoint)
    for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b""]):
        replay.send_multipart(frames)
    Follower(stack, pool.server.events, "-").await_held(held)
    assert not replay.poll(100)


def test_the_subscriber_of_the_document_runs(stack):
    pool = Pool(stack, b"s", security="plain")
    pool.register("a", fresh(6000))
    text = DOCUMENT.read_text(encoding="utf-8")
    (program,) = (
        block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "zmq.SUB" in block
    )
    events = pool.server.events
    eventually(lambda: not events._queue, "what was said before is published")
    process = subprocess.Popen(
        [sys.executable, "-c", program, events.endpoint, events.replay_endpoint],
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.stdout.close)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout.readline().endswith(" 6000 blocks\n")
    pool.put(secrets.token_bytes(16))
    assert process.stdout.readline().endswith(" 6001 blocks\n")
    pool.ask(m.Leave("a"))
    while not (line := process.stdout.readline()).endswith(" 0 blocks\n"):  # two batches
        assert line, "it has ended"


def test_who_does_not_read_answers_gets_no_more_and_holds_up_nobody(stack, caplog):
    pool = Pool(stack, b"s", security="plain", buffer_batches=4)
    pool.register("a", held := fresh(12_000))
    context = zmq.Context()
    stack.callback(context.term)
    greedy = context.socket(zmq.DEALER)
    stack.callback(greedy.close, linger=0)
    greedy.rcvhwm = 1
    greedy.connect(pool.server.events.replay_endpoint)
    for _ in range(150):  # 30 MB of answers
        greedy.send_multipart([b"", bytes(8)])
    Follower(stack, pool.server.events, "-").await_held(held)
    deadline = time.monotonic() + WAIT_S
    while "was given up" not in caplog.text:
        assert time.monotonic() < deadline, "the answers fitted: the test is too small"
        time.sleep(0.05)
    pool.ask(m.Leave("a"))
    Follower(stack, pool.server.events, "-").await_held([])
