"""Lanes against the server and against peers that misbehave; compiled and in Python."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import numpy as np
import pytest

from tests.support.data_connections import (
    KINDS,
    SOON_S,
    TOKEN,
    header,
    make_lane,
    post_one,
    progress,
    rig,
    tcp_pair,
)
from tests.support.waits import eventually
from transfer.backends.served import MAP
from transfer.wire import REQUEST, Reply, RequestKind, Status, parse_request

pytestmark = pytest.mark.unit


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def rng():
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def finish(kind: str, lanes, count: int) -> list[tuple]:
    """Move bytes until so many requests have ended."""
    done: list[tuple] = []
    end = time.monotonic() + SOON_S
    while len(done) < count and time.monotonic() < end:
        done += progress(kind, lanes, 1.0)
        assert all(lane.evidence is None for lane in lanes), [lane.evidence for lane in lanes]
    return done


def reply(transfer_id: int, status: Status = Status.OK, nbytes: int = 0) -> bytes:
    return Reply(status=status, transfer_id=transfer_id, slice_idx=0, nbytes=nbytes).encode()


@pytest.mark.parametrize("server_kind", KINDS)
def test_random_pieces_go_both_ways(kind: str, server_kind: str, rng) -> None:
    total = 1 << 20
    source, back = rng.integers(0, 256, total, dtype=np.uint8), np.zeros(total, dtype=np.uint8)
    with rig(server_kind, total) as owner:
        lane = make_lane(kind, owner.connect())
        expected = owner.memory.copy()
        for transfer_id in range(1, 60):
            count = int(rng.choice([1, 3, 200, 1024]))
            bounds = np.sort(rng.choice(total, 2 * count, replace=False))
            theirs, lengths = bounds[0::2].copy(), bounds[1::2] - bounds[0::2]
            ours = rng.permutation(theirs)
            ours = np.minimum(ours, total - lengths)
            nbytes = int(lengths.sum())
            fields = {"transfer_id": transfer_id, "oldest": transfer_id,
                      "num_pieces": count, "nbytes": nbytes}  # fmt: skip
            write = transfer_id % 2
            head = header(RequestKind.WRITE if write else RequestKind.READ, **fields)
            memory = source if write else back
            assert lane.post(transfer_id, head, write, memory.ctypes.data, ours, theirs, lengths)
            assert finish(kind, [lane], 1) == [(transfer_id, Status.OK.value, None)]
            for t, o, n in zip(theirs, ours, lengths, strict=True):
                if write:
                    expected[t : t + n] = source[o : o + n]
            assert (owner.memory == expected).all()
            if not write:  # pieces of one read may overlap here: check those that are last
                t, o, n = theirs[-1], ours[-1], lengths[-1]
                assert (back[o : o + n] == expected[t : t + n]).all()
        assert lane.close() == []
        served, refused, malformed = owner.server.take_counters()
        assert served > 0
        assert (refused, malformed) == (0, 0)


def test_many_requests_under_way_end_in_order(kind: str, rng) -> None:
    source = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    with rig(kind, 1 << 20) as owner:
        lane = make_lane(kind, owner.connect())
        for i in range(1, 2001):
            head = header(transfer_id=i, oldest=1, num_pieces=1, nbytes=500)
            assert post_one(lane, i, head, True, source.ctypes.data + 500 * i, 500 * i, 500)
        done = finish(kind, [lane], 2000)
        assert [item for item, _, _ in done] == list(range(1, 2001))
        assert (owner.memory[500:1_000_500] == source[500:1_000_500]).all()
        assert lane.in_flight == 0
        assert not lane.unsent
        lane.close()


def test_a_zero_length_write_is_answered(kind: str) -> None:
    with rig(kind) as owner:
        lane = make_lane(kind, owner.connect())
        assert lane.post("signal", header(immediate=7), True, 0, ints(), ints(), ints())
        assert finish(kind, [lane], 1) == [("signal", 0, None)]
        eventually(lambda: owner.told(0) == [7], "the immediate is told")
        lane.close()


def test_refusals_come_back_as_statuses(kind: str) -> None:
    memory = np.zeros(100, dtype=np.uint8)
    with rig(kind, 100, rights=1) as owner:
        lane = make_lane(kind, owner.connect())
        cases = [
            (RequestKind.WRITE, TOKEN, 0, Status.NO_RIGHT),
            (RequestKind.READ, TOKEN, 1, Status.OUT_OF_BOUNDS),
            (RequestKind.READ, TOKEN, -1, Status.OUT_OF_BOUNDS),
            (RequestKind.READ, b"x" * 16, 0, Status.UNKNOWN),
            (RequestKind.READ, TOKEN, 0, Status.OK),
        ]
        for i, (what, token, offset, _) in enumerate(cases, 1):
            head = header(what, transfer_id=i, oldest=i, num_pieces=1, nbytes=100, token=token)
            at = memory.ctypes.data
            assert post_one(lane, i, head, what is RequestKind.WRITE, at, offset, 100)
        done = finish(kind, [lane], len(cases))
        assert [status for _, status, _ in done] == [status.value for *_, status in cases]
        assert owner.server.take_counters() == (100, 4, 0)
        lane.close()


@pytest.mark.parametrize("descriptors", [0, 1, 2])
def test_a_mapping_travels_with_one_descriptor(kind: str, descriptors: int, tmp_path) -> None:
    ours, theirs = socket.socketpair()
    lane = make_lane(kind, ours)
    lane.post("map", header(RequestKind.MAP), False, 0, ints(), ints(), ints())
    assert parse_request(theirs.recv(REQUEST.size)).kind is RequestKind.MAP
    files = [os.open(tmp_path, os.O_RDONLY) for _ in range(descriptors)]
    answer = reply(1, nbytes=16) + np.array([5, 9], dtype="<u8").tobytes()
    if files:
        socket.send_fds(theirs, [answer], files)
    else:
        theirs.sendall(answer)
    done = progress(kind, [lane], SOON_S)
    if descriptors == 1:
        [(item, status, (fd, offset, nbytes))] = done
        assert (item, status, offset, nbytes) == ("map", 0, 5, 9)
        assert os.path.samestat(os.fstat(fd), os.stat(tmp_path))
        assert not os.get_inheritable(fd)
        os.close(fd)
    else:
        assert done == []
        assert lane.evidence is not None
    lane.close()
    theirs.close()
    for fd in files:
        os.close(fd)


def test_the_server_shares_memory_over_a_unix_socket(kind: str, tmp_path) -> None:
    with rig(kind) as owner:
        lane = make_lane(kind, owner.connect(socket.socketpair))
        lane.post("map", header(RequestKind.MAP), False, 0, ints(), ints(), ints())
        eventually(lambda: owner.told(MAP) == [(1, 0, TOKEN)], "the request is told")
        fd = os.open(tmp_path, os.O_RDONLY)
        owner.server.answer(owner.events[-1][2], 0, b"\1" + 7 * b"\0" + b"\2" + 7 * b"\0", fd)
        os.close(fd)
        [(_, status, (found, offset, nbytes))] = finish(kind, [lane], 1)
        assert (status, offset, nbytes) == (0, 1, 2)
        os.close(found)
        lane.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff" * 24,
        reply(9),
        reply(1, nbytes=5),
        reply(1, Status.UNKNOWN, 4),
        reply(1) + b"\0" * 24,
    ],
    ids=["noise", "not asked", "wrong size", "payload of a refusal", "too many"],
)
def test_nonsense_breaks_the_lane(kind: str, nonsense: bytes) -> None:
    ours, theirs = tcp_pair()
    lane = make_lane(kind, ours)
    memory = np.zeros(10, dtype=np.uint8)
    post_one(lane, "a", header(num_pieces=1, nbytes=10), True, memory.ctypes.data, 0, 10)
    theirs.sendall(nonsense)
    end = time.monotonic() + SOON_S
    while lane.evidence is None and time.monotonic() < end:
        progress(kind, [lane], 0.05 if lane.in_flight else 0.0)
    assert lane.evidence.startswith("malformed")
    assert not post_one(lane, "b", header(num_pieces=1, nbytes=10), True, memory.ctypes.data, 0, 10)
    lane.close()
    theirs.close()


def test_a_reply_before_its_request_is_complete_is_nonsense(kind: str) -> None:
    ours, theirs = tcp_pair()
    lane = make_lane(kind, ours)
    memory = np.zeros(64 << 20, dtype=np.uint8)
    nbytes = 4 << 20
    for i in range(1, 16):
        head = header(transfer_id=i, oldest=1, num_pieces=1, nbytes=nbytes)
        post_one(lane, i, head, True, memory.ctypes.data, 0, nbytes)
    progress(kind, [lane], 0.05)
    assert lane.unsent
    theirs.sendall(b"".join(reply(i) for i in range(1, 16)))
    end = time.monotonic() + SOON_S
    while lane.evidence is None and time.monotonic() < end:
        progress(kind, [lane], 0.05)
    assert "malformed" in lane.evidence
    assert lane.close()
    theirs.close()


def test_closing_gives_back_what_was_not_answered(kind: str) -> None:
    ours, theirs = tcp_pair()
    lane = make_lane(kind, ours)
    for i in range(1, 4):
        head = header(RequestKind.READ, transfer_id=i, oldest=1, num_pieces=1, nbytes=8)
        memory = np.zeros(8, dtype=np.uint8)
        post_one(lane, i, head, False, memory.ctypes.data, 0, 8)
    assert lane.close() == [1, 2, 3]
    assert lane.close() == []
    assert lane.fileno() == -1
    assert lane.evidence == "closed here"
    assert progress(kind, [lane], 0.1) == []
    theirs.close()


def test_a_read_that_was_given_up_touches_nothing(kind: str) -> None:
    ours, theirs = tcp_pair()
    lane = make_lane(kind, ours)
    memory = np.zeros(1000, dtype=np.uint8)
    head = header(RequestKind.READ, num_pieces=1, nbytes=1000)
    post_one(lane, "read", head, False, memory.ctypes.data, 0, 1000)
    theirs.sendall(reply(1, nbytes=1000) + b"\1" * 400)
    end = time.monotonic() + SOON_S
    while memory.sum() < 400 and time.monotonic() < end:
        progress(kind, [lane], 0.01)
    assert memory.sum() == 400
    assert lane.close() == ["read"]
    with contextlib.suppress(OSError):
        theirs.sendall(b"\1" * 600)
    progress(kind, [lane], 0.0)
    assert memory.sum() == 400
    theirs.close()


def test_a_sleeping_thread_wakes_when_the_lane_is_closed(kind: str) -> None:
    ours, theirs = tcp_pair()
    lane = make_lane(kind, ours)
    memory = np.zeros(8, dtype=np.uint8)
    head = header(RequestKind.READ, num_pieces=1, nbytes=8)
    post_one(lane, "read", head, False, memory.ctypes.data, 0, 8)
    thread = threading.Thread(target=progress, args=(kind, [lane], SOON_S))
    started = time.monotonic()
    thread.start()
    time.sleep(0.05)
    lane.close()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert time.monotonic() - started < SOON_S / 2
    theirs.close()


def test_the_other_side_ends(kind: str) -> None:
    ours, theirs = tcp_pair()
    lane = make_lane(kind, ours)
    theirs.close()
    end = time.monotonic() + SOON_S
    while lane.evidence is None and time.monotonic() < end:
        progress(kind, [lane], 0.0)  # an idle lane finds out too
    assert lane.evidence is not None
    lane.close()


def test_headers_must_fit_their_pieces(kind: str) -> None:
    ours, theirs = tcp_pair()
    lane = make_lane(kind, ours)
    one = header(num_pieces=1, nbytes=8)
    with pytest.raises(ValueError, match="pieces"):
        lane.post("a", one, True, 0, ints(0), ints(0), ints(9))
    with pytest.raises(ValueError, match="pieces"):
        lane.post("a", one, True, 0, ints(0, 4), ints(0, 4), ints(4, 4))
    with pytest.raises(ValueError):
        lane.post("a", one, True, 0, ints(0, 4), ints(0), ints(8))
    with pytest.raises(ValueError):
        lane.post("a", header(num_pieces=2, nbytes=8), True, 0, ints(0, 4), ints(0, 4), ints(9, -1))
    assert lane.in_flight == 0
    lane.close()
    theirs.close()
