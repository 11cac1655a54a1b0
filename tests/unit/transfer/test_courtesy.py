"""How bulk leaves the core to what is urgent, and whom its lanes are left to."""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.data_connections import KINDS, header, make_lane, post_one, progress, rig
from tests.support.engines import (
    engine_pair,
    offer,
)
from tests.support.waits import eventually
from transfer import Priority, TransferError, allocate, native
from transfer.event_loop import READABLE, WRITABLE
from transfer.wire import RequestKind

pytestmark = pytest.mark.unit

NBYTES = 4 << 20
PR_GET_TIMERSLACK = 30
SCHED_GETATTR = {"x86_64": 315, "aarch64": 275, "riscv64": 275}
needs_compiled = pytest.mark.skipif(not native.COMPILED, reason="Python lanes give no way")


def own_scheduling() -> tuple[int, bytes]:
    """Timer slack and all scheduling attributes of the calling thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(48)
    number = SCHED_GETATTR.get(platform.machine())
    if number is None or libc.syscall(number, 0, attributes, 48, 0):
        pytest.skip("this system does not tell")
    return libc.prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0), attributes.raw


@needs_compiled
@pytest.mark.parametrize("rails", [("127.0.0.1",), ("127.0.0.1", "127.0.0.2")])
@pytest.mark.parametrize("nbytes", [1 << 20, 24 << 20])
def test_a_thread_gets_back_what_it_gave_up(rails: tuple[str, ...], nbytes: int) -> None:
    """Short way and long, one rail and several: with a stream of activations beside it."""
    rng = np.random.default_rng()
    with engine_pair("tcp", rails=rails) as (a, b):
        theirs, ours = b.register(allocate(nbytes + 4096)), a.register(allocate(nbytes + 4096))
        key = offer(b, theirs, a)
        ours.array[:] = rng.integers(0, 256, nbytes + 4096, dtype=np.uint8)
        stopping = threading.Event()
        failures: list[TransferError] = []

        def stream() -> None:
            try:
                while not stopping.is_set():
                    a.write(b.name, ours, key, nbytes, nbytes, 4096,
                            priority=Priority.ACTIVATIONS).wait()  # fmt: skip
            except TransferError as error:  # told by the test's own thread
                failures.append(error)

        beside = threading.Thread(target=stream)
        beside.start()
        try:
            before = own_scheduling()
            for turn in range(5):
                a.write(b.name, ours, key, 0, 0, nbytes, priority=Priority.WEIGHTS).wait()
                assert own_scheduling() == before
                assert (theirs.array[:nbytes] == ours.array[:nbytes]).all(), turn
                ours.array[:nbytes] += 1
                a.read(b.name, ours, key, 0, 0, nbytes, priority=Priority.WEIGHTS).wait()
                assert own_scheduling() == before
                assert (theirs.array[:nbytes] == ours.array[:nbytes]).all(), turn
        finally:
            stopping.set()
            beside.join(60.0)
        assert not failures
        assert not beside.is_alive()
        # One that was sent again, as its rail had stalled, may still have an answer to come.
        eventually(lambda: native.compiled.num_urgent() == 0, "none is under way")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("urgent", [False, True])
def test_bulk_is_left_alone_for_the_next_to_wait(kind: str, urgent: bool) -> None:
    memory = np.random.default_rng().integers(0, 256, NBYTES, dtype=np.uint8)
    watched: list[int] = []
    with rig(kind, NBYTES) as owner:
        lane = make_lane(kind, owner.connect())
        lane.urgent = urgent
        if kind == "python":
            lane.bind(-1, watched.append)
        head = header(RequestKind.WRITE, transfer_id=1, oldest=1, num_pieces=1, nbytes=NBYTES)
        assert post_one(lane, "item", head, True, memory.ctypes.data, 0, NBYTES)
        assert lane.claim()
        assert lane.leave(threading.get_ident() + 1) is False, "somebody else's lead"
        assert lane.leader == threading.get_ident()
        assert lane.leave(threading.get_ident()) is not urgent
        assert lane.leader == 0
        assert lane.leave(0) is False, "the engine's thread sees to it now"
        if kind == "python":
            everything = READABLE | WRITABLE
            assert watched == [0, everything]
        assert lane.claim()
        done: list[tuple] = []
        end = time.monotonic() + 60.0
        while not done and time.monotonic() < end:
            done += progress(kind, [lane], 1.0)
        assert [item for item, _, _ in done] == ["item"]
        assert lane.leave(threading.get_ident()) is False, "nothing is under way"
        assert (owner.memory == memory).all()
        lane.close()


def test_what_a_waiting_thread_leaves_goes_on_without_it() -> None:
    """Whoever waits for one transfer leads the lanes of others too, and leaves them."""
    with engine_pair("tcp", rails=("127.0.0.1", "127.0.0.2")) as (a, b):
        theirs, ours = b.register(allocate(NBYTES * 8)), a.register(allocate(NBYTES * 8))
        key = offer(b, theirs, a)
        ours.array[:] = np.random.default_rng().integers(0, 256, NBYTES * 8, dtype=np.uint8)
        first, last = (
            a.write(b.name, ours, key, at, at, NBYTES * 4, priority=Priority.WEIGHTS)
            for at in (0, NBYTES * 4)
        )
        first.wait()
        # Not by `done`, which would have it attended to.
        eventually(lambda: last._finished, "the other one ends")
        assert (theirs.array == ours.array).all()


@needs_compiled
def test_bulk_that_nobody_waits_for_goes_on_beside_a_stream() -> None:
    """The engine's thread gives way too, and takes the turns of what it sees to."""
    with engine_pair("tcp") as (a, b):
        theirs, ours = b.register(allocate(NBYTES + 4096)), a.register(allocate(NBYTES + 4096))
        key = offer(b, theirs, a)
        ours.array[:] = np.random.default_rng().integers(0, 256, NBYTES + 4096, dtype=np.uint8)
        bulk = a.write(b.name, ours, key, 0, 0, NBYTES, priority=Priority.WEIGHTS)
        end = time.monotonic() + 60.0
        while not bulk._finished and time.monotonic() < end:
            a.write(b.name, ours, key, NBYTES, NBYTES, 4096, priority=Priority.ACTIVATIONS).wait()
        assert bulk._finished, "none starves"
        assert (theirs.array == ours.array).all()


@needs_compiled
@pytest.mark.parametrize("gap_s", [100e-6, 500e-6, 3e-3])
def test_bulk_of_many_slices_moves_in_the_gaps_of_a_stream(gap_s: float) -> None:
    """Whoever waits for it waits for gaps, with steps and with the books: all of it comes."""
    nbytes = NBYTES * 8
    with engine_pair("tcp", rails=("127.0.0.1", "127.0.0.2")) as (a, b):
        theirs, ours = b.register(allocate(2 * nbytes)), a.register(allocate(2 * nbytes))
        key = offer(b, theirs, a)
        ours.array[:] = np.random.default_rng().integers(0, 256, 2 * nbytes, dtype=np.uint8)
        failures: list[TransferError] = []

        def move() -> None:
            try:
                a.write(b.name, ours, key, 0, 0, nbytes, priority=Priority.WEIGHTS).wait()
            except TransferError as error:  # told by the test's own thread
                failures.append(error)

        bulk = threading.Thread(target=move)
        bulk.start()
        size = 256 << 10
        end = time.monotonic() + 30.0
        number = 0
        while bulk.is_alive() and time.monotonic() < end:
            at = nbytes + number % (nbytes // size) * size
            a.write(b.name, ours, key, at, at, size, priority=Priority.ACTIVATIONS).wait()
            assert (theirs.array[at : at + size] == ours.array[at : at + size]).all()
            number += 1
            time.sleep(gap_s)
        bulk.join(30.0)
        assert not bulk.is_alive()
        assert not failures
        assert (theirs.array[:nbytes] == ours.array[:nbytes]).all()
        assert native.compiled.num_urgent() == 0


@needs_compiled
@pytest.mark.parametrize("rails", [("127.0.0.1",), ("127.0.0.1", "127.0.0.2")])
@pytest.mark.parametrize("reads", [False, True])
def test_the_thread_of_a_stream_takes_the_turns_of_bulk(
    rails: tuple[str, ...], *, reads: bool
) -> None:
    """Bulk's own thread sleeps; what is urgent and what is not come whole, and both end."""
    nbytes, small = NBYTES * 8, 4096
    with engine_pair("tcp", rails=rails) as (a, b):
        theirs, ours = b.register(allocate(nbytes + small)), a.register(allocate(nbytes + small))
        key = offer(b, theirs, a)
        source, target = (theirs, ours) if reads else (ours, theirs)
        source.array[:] = np.random.default_rng().integers(0, 256, nbytes + small, dtype=np.uint8)
        move = a.read if reads else a.write
        failures: list[TransferError] = []
        wrong = 0
        stopping = threading.Event()

        def bulk() -> None:
            nonlocal wrong
            try:
                while not stopping.is_set():
                    target.array[:nbytes] = 0
                    move(b.name, ours, key, 0, 0, nbytes, priority=Priority.WEIGHTS).wait()
                    wrong += not (theirs.array[:nbytes] == ours.array[:nbytes]).all()
            except TransferError as error:  # told by the test's own thread
                failures.append(error)

        before = native.compiled.num_turns_taken()
        thread = threading.Thread(target=bulk)
        thread.start()
        end = time.monotonic() + 60.0
        while native.compiled.num_turns_taken() < before + 3 and time.monotonic() < end:
            ours.array[nbytes:] += 1
            for _ in range(256):  # without a gap
                a.write(b.name, ours, key, nbytes, nbytes, small,
                        priority=Priority.ACTIVATIONS).wait()  # fmt: skip
            assert (theirs.array[nbytes:] == ours.array[nbytes:]).all()
        taken = native.compiled.num_turns_taken() - before
        stopping.set()
        thread.join(60.0)
        assert not thread.is_alive(), "it has heard that the stream is over"
        assert not failures
        assert not wrong
        assert taken >= 3
        eventually(lambda: native.compiled.num_urgent() == 0, "none is under way")


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_request_ends_beside_short_ones_without_an_end(kind: str) -> None:
    """The far shorter go first where there is a choice, and starve nobody."""
    memory = np.random.default_rng().integers(0, 256, 2 * NBYTES, dtype=np.uint8)
    short = 256 << 10
    with rig(kind, 2 * NBYTES) as owner:
        lanes = [make_lane(kind, owner.connect()) for _ in range(3)]

        def post(lane: object, number: int, at: int, nbytes: int) -> None:
            head = header(RequestKind.WRITE, transfer_id=number, oldest=1, num_pieces=1,
                          nbytes=nbytes)  # fmt: skip
            assert post_one(lane, number, head, True, memory.ctypes.data + at, at, nbytes)

        post(lanes[0], 1, 0, NBYTES)
        num_posted, done = 1, set[object]()
        end = time.monotonic() + 20.0
        while 1 not in done and time.monotonic() < end:
            for lane in lanes[1:]:
                while lane.in_flight < 4:
                    num_posted += 1
                    post(lane, num_posted, NBYTES + num_posted % 16 * short, short)
            done.update(item for item, _, _ in progress(kind, lanes, 0.1))
        assert 1 in done, "none starves"
        while any(lane.in_flight for lane in lanes) and time.monotonic() < end:
            progress(kind, lanes, 0.1)
        assert (owner.memory[:NBYTES] == memory[:NBYTES]).all()
        for lane in lanes:
            lane.close()


@needs_compiled
def test_a_lane_of_bulk_gives_way_to_others_requests_only() -> None:
    memory = np.random.default_rng().integers(0, 256, NBYTES, dtype=np.uint8)
    with rig("compiled", NBYTES) as owner:
        bulk, urgent = (
            make_lane("compiled", owner.connect()),
            make_lane("compiled", owner.connect()),
        )
        urgent.urgent = True

        def post(lane: object, number: int, nbytes: int) -> None:
            head = header(RequestKind.WRITE, transfer_id=number, oldest=1, num_pieces=1,
                          nbytes=nbytes)  # fmt: skip
            assert post_one(lane, number, head, True, memory.ctypes.data, 0, nbytes)

        assert post_in_thread(post, bulk, 1, NBYTES)
        assert not bulk.gives_way(), "nothing urgent is about"
        post(urgent, 2, 64)
        assert not bulk.gives_way(), "its own one a thread cannot delay"
        assert not urgent.gives_way()
        assert post_in_thread(post, urgent, 3, 64)
        eventually(bulk.gives_way, "it has no turn")
        done: list[int] = []
        end = time.monotonic() + 60.0
        while len(done) < 3 and time.monotonic() < end:
            done += [item for item, _, _ in progress("compiled", [bulk, urgent], 1.0)]
        assert sorted(done) == [1, 2, 3]
        assert (owner.memory == memory).all()
        bulk.close()
        urgent.close()


def post_in_thread(post: Callable[..., None], *arguments: object) -> bool:
    """Whether another thread has posted it."""
    posted: list[bool] = []
    poster = threading.Thread(target=lambda: posted.append(post(*arguments) is None))
    poster.start()
    poster.join(60.0)
    return posted == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_sleeps_when_nothing_comes(kind: str) -> None:
    """It looks for another request for a moment, and no longer: in processor time."""
    memory = np.random.default_rng().integers(0, 256, 64, dtype=np.uint8)
    with rig(kind, 64) as owner:
        lane = make_lane(kind, owner.connect())
        for number in range(1, 51):
            head = header(RequestKind.WRITE, transfer_id=number, oldest=number, num_pieces=1,
                          nbytes=64)  # fmt: skip
            assert post_one(lane, number, head, True, memory.ctypes.data, 0, 64)
            end = time.monotonic() + 60.0
            while lane.in_flight and time.monotonic() < end:
                progress(kind, [lane], 1.0)
            assert not lane.in_flight
        clock = time.pthread_getcpuclockid(owner.ident)
        before = time.clock_gettime(clock)
        time.sleep(0.5)
        assert time.clock_gettime(clock) - before < 0.1
        assert (owner.memory == memory).all()
        lane.close()
