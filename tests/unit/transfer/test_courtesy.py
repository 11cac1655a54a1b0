"""How bulk leaves the core to what is urgent, and whom its lanes are left to."""

from __future__ import annotations

import ctypes
import platform
import threading
import time

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
            beside.join(30.0)
        assert not failures
        assert not beside.is_alive()
        assert native.compiled.num_urgent() == 0


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
        end = time.monotonic() + 20.0
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
