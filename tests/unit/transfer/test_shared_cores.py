"""An owner that shares its core with whoever sends it a stream of requests, and goes to another."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.engines import engine_pair, offer
from tests.support.waits import eventually
from transfer import Priority, RegionKey, TransferEngine, allocate, native
from transfer.memory.region import Region

NBYTES = 4096
CORES = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(not native.COMPILED, reason="owners in Python look for nothing"),
    pytest.mark.skipif(not 1 < len(CORES) <= 8, reason="one core, or one is idle"),
]


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Another process wants this core, so that the kernel sends nobody there."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as burner:
        try:
            yield
        finally:
            burner.kill()


@contextmanager
def this_thread_on(cores: set[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def owners_thread(before: set[threading.Thread], peer: str) -> int:
    """The kernel's number of the thread that serves the connections of an engine."""
    made = [t for t in set(threading.enumerate()) - before if t.name == f"transfer-{peer[:8]}-data"]
    assert len(made) == 1, made
    assert made[0].native_id is not None
    return made[0].native_id


def stream(engine: TransferEngine, peer: str, ours: Region, key: RegionKey, count: int) -> None:
    for _ in range(count):
        ours.array[:] += 1
        engine.write(peer, ours, key, 0, 0, NBYTES, priority=Priority.ACTIVATIONS).wait()


def test_it_goes_only_where_it_may_and_may_afterwards_go_where_it_might() -> None:
    before = set(threading.enumerate())
    with engine_pair("tcp") as (a, b):
        theirs, ours = b.register(allocate(NBYTES)), a.register(allocate(NBYTES))
        key = offer(b, theirs, a)
        ours.array[:] = np.random.default_rng().integers(0, 256, NBYTES, dtype=np.uint8)
        owner = owners_thread(before, b.name)
        with this_thread_on({CORES[0]}), busy_core(CORES[1]):
            os.sched_setaffinity(owner, {CORES[0]})
            begin = native.compiled.num_cores_changed()
            stream(a, b.name, ours, key, 3000)
            assert native.compiled.num_cores_changed() == begin, "there is none that it may use"
            assert os.sched_getaffinity(owner) == {CORES[0]}
            end = time.monotonic() + 240.0
            while native.compiled.num_cores_changed() == begin and time.monotonic() < end:
                os.sched_setaffinity(owner, {CORES[0]})
                stream(a, b.name, ours, key, 200)
                os.sched_setaffinity(owner, {CORES[0], CORES[1]})
                stream(a, b.name, ours, key, 2000)
            assert native.compiled.num_cores_changed() > begin, "it shares the core for long"
            stream(a, b.name, ours, key, 200)
            both = {CORES[0], CORES[1]}
            eventually(lambda: os.sched_getaffinity(owner) == both, "it may go back")
        assert (theirs.array == ours.array).all()


def test_who_sends_a_request_now_and_then_has_no_stream() -> None:
    before = set(threading.enumerate())
    with engine_pair("tcp") as (a, b):
        theirs, ours = b.register(allocate(NBYTES)), a.register(allocate(NBYTES))
        key = offer(b, theirs, a)
        owner = owners_thread(before, b.name)
        with this_thread_on({CORES[0]}), busy_core(CORES[1]):
            begin = native.compiled.num_cores_changed()
            for _ in range(300):
                os.sched_setaffinity(owner, {CORES[0]})
                os.sched_setaffinity(owner, {CORES[0], CORES[1]})
                stream(a, b.name, ours, key, 1)
                time.sleep(1e-3)
            assert native.compiled.num_cores_changed() == begin
        assert (theirs.array == ours.array).all()
