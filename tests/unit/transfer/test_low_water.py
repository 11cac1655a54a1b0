"""Long payloads wake their reader seldom, but always before they end."""

from __future__ import annotations

import os
import select
import time

import numpy as np
import pytest

from tests.support.data_connections import (
    KINDS,
    SOON_S,
    header,
    make_lane,
    post_one,
    progress,
    tcp_pair,
)
from transfer.wire import Reply, RequestKind, Status

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_payload_makes_the_lane_readable(kind: str) -> None:
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
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
