"""The link against a real ROUTER of the control channel, present, late and absent."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import contextmanager

import pytest
import zmq

from moe_runtime.front_link import FrontLink
from moe_runtime.messages import (
    Cancel,
    Drain,
    Goodbye,
    Load,
    Stop,
    decode_worker_message,
    encode,
)
from transfer.control import secure_server

WAIT_S = 30.0
NAME = "00ff" * 4


@pytest.fixture
def secret():
    return secrets.token_bytes(32)


class Front:
    """The other end: one ROUTER, used by the test's thread."""

    def __init__(self, socket, port):
        self.socket, self.address = socket, f"127.0.0.1:{port}"

    def receive(self):
        assert self.socket.poll(WAIT_S * 1000), "nothing came"
        identity, data = self.socket.recv_multipart()
        return identity.decode(), decode_worker_message(data)

    def send(self, message):
        data = message if isinstance(message, bytes) else encode(message)
        self.socket.send_multipart([NAME.encode(), data])


@contextmanager
def front(secret, port=None):
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    secure_server(socket, secret)
    if port is None:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    else:
        socket.bind(f"tcp://127.0.0.1:{port}")
    try:
        yield Front(socket, port)
    finally:
        socket.close()
        context.term()


@contextmanager
def link(address, secret, *, on_stop=lambda: None):
    arrived = threading.Event()
    made = FrontLink(address, secret, incarnation=NAME, on_arrival=arrived.set, on_stop=on_stop)
    made.open()
    try:
        yield made, arrived
    finally:
        made.close()


def load(number):
    return Load(
        incarnation=NAME,
        running=number,
        waiting=0,
        free_pages=1,
        num_pages=2,
        epoch=3,
        counters={},
    )


def take(link, arrived, count):
    messages = []
    deadline = time.monotonic() + WAIT_S
    while len(messages) < count:
        assert time.monotonic() < deadline, f"{messages} of {count}"
        if arrived.wait(0.1):
            arrived.clear()
        messages += link.received()
    return messages


def test_messages_keep_their_order_both_ways(secret):
    with front(secret) as other, link(other.address, secret) as (mine, arrived):
        for number in range(500):
            mine.send(load(number))
        assert [other.receive() for _ in range(500)] == [(NAME, load(n)) for n in range(500)]
        sent = [Cancel(request_id=str(number)) for number in range(200)] + [Drain()]
        for message in sent:
            other.send(message)
        assert take(mine, arrived, len(sent)) == sent
        assert mine.received() == []


def test_stop_is_told_at_once_and_not_queued(secret):
    stopped = threading.Event()
    with front(secret) as other, link(other.address, secret, on_stop=stopped.set) as (mine, _):
        mine.send(load(0))
        other.receive()
        other.send(Stop())
        assert stopped.wait(WAIT_S)
        assert mine.received() == []


def test_what_is_no_message_is_passed_over(secret):
    with front(secret) as other, link(other.address, secret) as (mine, arrived):
        mine.send(load(0))
        other.receive()
        for message in (b"", secrets.token_bytes(40), encode(load(1)), Cancel(request_id="good")):
            other.send(message)
        assert take(mine, arrived, 1) == [Cancel(request_id="good")]


def test_the_last_words_are_delivered(secret):
    with front(secret) as other:
        with link(other.address, secret) as (mine, _):
            mine.send(load(0))
            assert other.receive() == (NAME, load(0))
            mine.send(Goodbye(incarnation=NAME))
        assert other.receive() == (NAME, Goodbye(incarnation=NAME))


def test_an_absent_front_stops_neither_the_sender_nor_the_end(secret):
    with front(secret) as gone:
        address = gone.address
    with link(address, secret) as (mine, _):
        for number in range(5000):  # more than the socket takes
            mine.send(load(number))
        started = time.monotonic()
    assert time.monotonic() - started < WAIT_S / 2, "closing waited for the front"


def test_a_front_that_comes_late_hears_everything(secret):
    with front(secret) as gone:
        port = int(gone.address.rpartition(":")[2])
    with link(gone.address, secret) as (mine, _):
        for number in range(3000):
            mine.send(load(number))
        with front(secret, port) as other:
            found = [other.receive()[1] for _ in range(3000)]
            assert found == [load(number) for number in range(3000)]


def test_another_secret_brings_nothing(secret):
    with front(secret) as other, link(other.address, b"another secret, wrong") as (mine, _):
        mine.send(load(0))
        assert not other.socket.poll(500)
