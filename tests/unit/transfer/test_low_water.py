"""Long payloads wake their reader seldom, but always before they end."""

from __future__ import annotations

import random
import select
import socket
import threading
import time

import numpy as np
import pytest

from tests.support.data_connections import (
    KINDS,
    SOON_S,
    Rig,
    header,
    make_lane,
    post_one,
    progress,
    tcp_pair,
    write_bytes,
)
from tests.unit.transfer.test_server import read_reply
from transfer.wire import Reply, RequestKind, Status

pytestmark = pytest.mark.unit


def send_with_pauses(sock: socket.socket, data: bytes, pauses: random.Random) -> None:
    """Send parts of any size, with pauses shorter and longer than a look."""
    while data:
        step = pauses.randrange(1, 1 << 20)
        sock.sendall(data[:step])
        data = data[step:]
        time.sleep(pauses.choice((0.0, 1e-5, 3e-3)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_payload_makes_the_lane_readable(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    nbytes = int(rng.integers(300 << 10, 900 << 10))
    payload = rng.integers(0, 256, nbytes, dtype=np.uint8)
    memory = np.zeros(nbytes, dtype=np.uint8)
    ours, theirs = tcp_pair()
    lane = make_lane(kind, ours)
    head = header(RequestKind.READ, num_pieces=1, nbytes=nbytes)
    assert post_one(lane, "read", head, False, memory.ctypes.data, 0, nbytes)
    reply = Reply(status=Status.OK, transfer_id=1, slice_idx=0, nbytes=nbytes).encode()
    sent, done, epoll = 0, [], select.epoll()
    epoll.register(lane.fileno(), select.EPOLLIN)
    data = reply + payload.tobytes()
    deadline = time.monotonic() + SOON_S
    # As the engine's thread does it: asleep in an epoll, moving what there is without waiting.
    while not done:
        assert time.monotonic() < deadline, "the lane is readable no more"
        step = int(rng.integers(1, 300 << 10))
        theirs.sendall(data[sent : sent + step])
        sent += step
        if epoll.poll(0.2):
            done = progress(kind, [lane], 0.0)
    assert done == [("read", 0, None)]
    assert (memory == payload).all()
    epoll.close()
    lane.close()
    theirs.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_with_pauses_is_looked_for_and_slept_for(kind: str, seed: int) -> None:
    """Longer than a look, and shorter: whoever waits takes all of each of several answers."""
    rng, pauses = np.random.default_rng(seed), random.Random(seed)
    sizes = [int(n) for n in rng.integers(100 << 10, 3 << 20, 12)]
    payloads = [rng.integers(0, 256, n, dtype=np.uint8) for n in sizes]
    ours, theirs = tcp_pair()
    lane = make_lane(kind, ours)

    def answer() -> None:
        for number, payload in enumerate(payloads, 1):
            reply = Reply(status=Status.OK, transfer_id=number, slice_idx=0, nbytes=payload.nbytes)
            data = reply.encode() + payload.tobytes()
            send_with_pauses(theirs, data, pauses)

    owner = threading.Thread(target=answer)
    memories = [np.zeros(n, dtype=np.uint8) for n in sizes]
    for number, memory in enumerate(memories, 1):
        head = header(
            RequestKind.READ, num_pieces=1, nbytes=memory.nbytes, transfer_id=number, oldest=number
        )
        assert post_one(lane, number, head, False, memory.ctypes.data, 0, memory.nbytes)
    owner.start()
    done: list[tuple] = []
    deadline = time.monotonic() + SOON_S
    while len(done) < len(sizes):
        assert time.monotonic() < deadline, "it sleeps for more than is to come"
        done += progress(kind, [lane], 1.0)
    owner.join(SOON_S)
    assert done == [(number, 0, None) for number in range(1, len(sizes) + 1)]
    assert all((m == p).all() for m, p in zip(memories, payloads, strict=True))
    lane.close()
    theirs.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_owner_lands_writes_that_come_with_pauses(kind: str, seed: int) -> None:
    rng, pauses = np.random.default_rng(seed), random.Random(seed)
    nbytes = 4 << 20
    owner = Rig(kind, nbytes)
    sock = owner.connect()
    for number in range(1, 9):
        payload = rng.integers(0, 256, int(rng.integers(100 << 10, nbytes)), dtype=np.uint8)
        data = write_bytes(0, payload.tobytes(), transfer_id=number, oldest=number)
        send_with_pauses(sock, data, pauses)
        assert read_reply(sock) is Status.OK
        assert (owner.memory[: payload.nbytes] == payload).all()
    sock.close()
    owner.close()
