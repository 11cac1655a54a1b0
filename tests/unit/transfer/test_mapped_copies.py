"""Single pieces between mapped memories: one compiled call, or the same in Python."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import (
    BOTH,
    engine_pair,
    offer,
)
from tests.support.waits import eventually
from transfer import (
    Access,
    AccessRefused,
    EngineClosed,
    PeerLost,
    Priority,
    TransferError,
    allocate,
    native,
)
from transfer.prepared import Prepared

NBYTES = 1 << 20
WAYS = ["python", "compiled"] if native.COMPILED else ["python"]


class Scene:
    """Two engines with one window of `NBYTES` bytes that is mapped, `way` by which it is copied."""

    def __init__(self, one: Any, two: Any, way: str) -> None:
        self.one, self.two, self.way = one, two, way
        self.memory = allocate(NBYTES)
        self.theirs = two.register(self.memory)
        self.key = offer(two, self.theirs, one)
        self.ours = torch.zeros(NBYTES, dtype=torch.uint8)
        self.region = one.register(self.ours)
        one.write(two.name, self.region, self.key, 0, 0, 1).wait()
        if way == "python":
            one._mover.post_short = lambda *arguments: None

    def write(self, ours: Any, theirs: Any, nbytes: Any, **options: Any) -> Any:
        return self.one.write(self.two.name, self.region, self.key, ours, theirs, nbytes, **options)

    def read(self, ours: Any, theirs: Any, nbytes: Any, **options: Any) -> Any:
        return self.one.read(self.two.name, self.region, self.key, ours, theirs, nbytes, **options)


@pytest.fixture(params=WAYS)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with engine_pair() as (one, two):
        yield Scene(one, two, request.param)


def test_bytes_and_counts_are_those_of_a_model(scene: Scene) -> None:
    rng = np.random.default_rng()
    ours = rng.integers(0, 256, NBYTES, dtype=np.uint8)
    theirs = rng.integers(0, 256, NBYTES, dtype=np.uint8)
    scene.ours.numpy()[:] = ours
    scene.memory.tensor.numpy()[:] = theirs
    before = scene.one.statistics()
    expected = {priority: [0, 0] for priority in Priority}
    moved = {"write": 0, "read": 0}
    for _ in range(300):
        size = int(rng.choice([1, 64, 4096, 65535, 65536, 65537, 300_000]))
        a, b = (int(n) for n in rng.integers(0, NBYTES - size + 1, 2))
        given = rng.choice([None, *Priority])
        given = None if given is None else Priority(given)
        writes = bool(rng.integers(2))
        transfer = (scene.write if writes else scene.read)(a, b, size, priority=given)
        transfer.wait()
        if writes:
            theirs[b : b + size] = ours[a : a + size]
        else:
            ours[a : a + size] = theirs[b : b + size]
        bulk = Priority.KV_PUT if writes else Priority.KV_GET
        kind = given if given is not None else Priority.ACTIVATIONS if size <= 65536 else bulk
        expected[kind][0] += 1
        expected[kind][1] += size
        moved["write" if writes else "read"] += size
    np.testing.assert_array_equal(scene.memory.tensor.numpy(), theirs)
    np.testing.assert_array_equal(scene.ours.numpy(), ours)
    after = scene.one.statistics()
    for priority, (operations, nbytes) in expected.items():
        old, new = before.priorities[priority], after.priorities[priority]
        assert (new.operations - old.operations, new.bytes - old.bytes) == (operations, nbytes)
        assert new.queued == old.queued
    old, new = before.backends["shared_memory"], after.backends["shared_memory"]
    assert new == dataclasses.replace(
        old,
        operations=old.operations + 300,
        bytes_written=old.bytes_written + moved["write"],
        bytes_read=old.bytes_read + moved["read"],
    )


def test_its_handle_is_that_of_any_transfer(scene: Scene) -> None:
    called: list[bool] = []
    for operation, transfer in (("write", scene.write(0, 0, 70)), ("read", scene.read(0, 0, 70))):
        if scene.way == "compiled":
            assert isinstance(transfer, native.MappedCopy)
        assert transfer.done()
        assert transfer.peer == scene.two.name
        assert transfer.operation == operation
        assert transfer.backend == "shared_memory"
        assert transfer.nbytes == transfer.bytes_moved == 70
        assert transfer.attempts == 1
        assert transfer.rail is None
        assert transfer.rail_name == ""
        assert 0 <= transfer.elapsed_s < 60
        for wait in (transfer.wait, lambda t=transfer: t.wait(0.0)):
            assert wait() is None
        assert transfer.wait(timeout_s=1.0) is None
        with pytest.raises(TypeError):
            transfer.wait(1.0, 2.0)
        with pytest.raises(TypeError):
            transfer.wait(seconds=1.0)
        transfer.when_done(lambda: called.append(True))
        transfer.abandon()

        async def await_it(transfer: Any = transfer) -> None:
            await transfer

        asyncio.run(await_it())
    assert called == [True, True]


@pytest.mark.parametrize(("ours", "theirs", "nbytes"), [
    (0, NBYTES, 1), (0, 1, NBYTES), (0, 2**63 - 1, 2), (0, 2**64, 1), (0, -1, 2),
    (0, 0, NBYTES + 1), (NBYTES, 0, 1), (1, 0, NBYTES), (2**63 - 1, 0, 1), (-1, 0, 2),
    (0, 0, -1), (0, 0, 2**63), (2**62, 2**62, 2**62),
])  # fmt: skip
def test_nothing_outside_is_touched(scene: Scene, ours: int, theirs: int, nbytes: int) -> None:
    scene.ours.fill_(1)
    for move in (scene.write, scene.read):
        with pytest.raises((AccessRefused, ValueError, OverflowError)):
            move(ours, theirs, nbytes).wait()
    assert not scene.memory.tensor.any()
    assert bool(scene.ours.all())


def test_rights_and_zero_bytes(scene: Scene) -> None:
    one, two = scene.one, scene.two
    for access in (Access.READ, Access.WRITE):
        scene.key = offer(two, scene.theirs, one, access)
        allowed, refused = scene.write, scene.read
        if access is Access.READ:
            allowed, refused = refused, allowed
        for _ in range(2):
            allowed(0, 0, 8).wait()
            with pytest.raises(AccessRefused):
                refused(0, 0, 8)
    assert scene.write(NBYTES, 0, 0).nbytes == 0
    with pytest.raises(TypeError):
        scene.write(0, 0, 8, priority=1)
    with pytest.raises(ValueError, match="not"):
        one.write("nobody", scene.region, scene.key, 0, 0, 8)


def test_an_immediate_is_counted(scene: Scene) -> None:
    scene.ours[5] = 9
    scene.write(5, 6, 1, immediate=3).wait()
    scene.two.expect({(scene.one.name, 3): 1}, timeout_s=20)
    assert int(scene.memory.tensor[6]) == 9
    with pytest.raises(ValueError, match="immediate"):
        scene.write(0, 0, 8, immediate=2**32)


def test_a_withdrawn_key_a_lost_peer_and_a_closed_engine(scene: Scene) -> None:
    one, two = scene.one, scene.two
    prepared = one.prepare_write(two.name, scene.region, scene.key, 0, 0, 4096)
    assert isinstance(prepared, Prepared)
    scene.ours.fill_(1)
    prepared.post().wait()
    assert int(scene.memory.tensor.sum()) == 4096
    windows = one._table.ready(two.name).windows
    two.withdraw(scene.key)
    eventually(lambda: windows.find(scene.key) is None, "the key is forgotten")
    scene.memory.tensor.zero_()
    for move in (lambda: scene.write(0, 0, 8), lambda: scene.read(0, 0, 8), prepared.post):
        with pytest.raises(AccessRefused):
            move().wait()
    scene.key = offer(two, scene.theirs, one, BOTH)
    scene.write(0, 0, 8).wait()
    one.disconnect(two.name, reason="a test")
    eventually(lambda: one._table.get(two.name) is None, "the link is gone")
    with pytest.raises(PeerLost):
        scene.write(0, 0, 8).wait()
    assert int(scene.memory.tensor.sum()) == 8
    one.close()
    with pytest.raises((EngineClosed, TransferError)):
        scene.write(0, 0, 8).wait()


def test_nothing_is_kept(scene: Scene) -> None:
    window = scene.one._table.ready(scene.two.name).windows.find(scene.key)
    watched = (scene.region, scene.key, window, scene.key.token, scene.two.name, Priority.KV_GET)

    def count() -> list[int]:
        gc.collect()
        return [sys.getrefcount(thing) for thing in watched]

    def storm() -> None:
        for i in range(1000):
            scene.write(i, i, 70_000 if i % 10 == 0 else 10).wait()
            scene.read(0, 0, 10, priority=Priority.KV_GET).wait()
            with pytest.raises((AccessRefused, ValueError)):
                scene.read(0, NBYTES, 1)

    storm()
    before = count()
    storm()
    assert count() == before


def test_a_key_is_withdrawn_while_threads_copy(scene: Scene) -> None:
    one, two = scene.one, scene.two
    started, refused = threading.Barrier(3), []

    def copy_until_refused() -> None:
        started.wait(20)
        try:
            while True:
                scene.write(0, 0, NBYTES).wait()
        except AccessRefused as error:
            refused.append(error)

    threads = [threading.Thread(target=copy_until_refused) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait(20)
    two.withdraw(scene.key)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(refused) == 2
    windows = one._table.ready(two.name).windows
    assert not windows.by_token
