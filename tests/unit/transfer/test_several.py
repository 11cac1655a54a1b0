"""A large operation over several rails is moved by the thread that waits for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.support.engines import engine_pair, offer
from transfer import Priority, Transfer, allocate, native
from transfer.rails.several import SeveralLinks

pytestmark = pytest.mark.unit

NBYTES = 24 << 20
RAILS = ("127.0.0.1", "127.0.0.2")


def test_who_waits_moves_the_bytes_of_all_rails() -> None:
    rng = np.random.default_rng()
    with engine_pair("tcp", rails=RAILS) as (a, b):
        theirs, ours = b.register(allocate(NBYTES)), a.register(allocate(NBYTES))
        key = offer(b, theirs, a)
        ours.array[:] = rng.integers(0, 256, NBYTES, dtype=np.uint8)
        for round_idx in range(4):
            priority = [Priority.WEIGHTS, Priority.KV_PUT][round_idx % 2]
            handles = [
                a.write(b.name, ours, key, at, at, NBYTES // 2, priority=priority)
                for at in (0, NBYTES // 2)
            ]
            waiting = [threading.Thread(target=handle.wait) for handle in handles[1:]]
            for thread in waiting:
                thread.start()
            handles[0].wait()
            for thread in waiting:
                thread.join(30.0)
                assert not thread.is_alive()
            assert (theirs.array == ours.array).all(), round_idx
            theirs.array[:] = 0
        a.write(b.name, ours, key, 0, 0, NBYTES).wait()
        ours.array[:] = 0
        a.read(b.name, ours, key, 0, 0, NBYTES).wait()
        assert (ours.array == theirs.array).all()
        used = [rail for rail in a.statistics().rails if rail.slices]
        assert len(used) == len(RAILS)
        assert all(rail.bytes_in_flight == 0 for rail in used)
        if native.COMPILED:
            assert native.compiled.num_urgent() == 0


class Link:
    """One that has lanes for a transfer, or none."""

    def __init__(self, lanes: list[str]) -> None:
        self.lanes = lanes
        self.reported: list[tuple[object, int, object]] = []
        self.left = 0

    def claim(self, handle: object) -> list[str]:
        return self.lanes

    def move(self, lanes: list[str], timeout_s: float) -> list[tuple[object, int, None]]:
        return [(f"{lane} item", 0, None) for lane in lanes]

    def carries(self, item: str) -> bool:
        return item.split()[0] in self.lanes

    def report(self, finished: list[tuple[object, int, object]], lanes: list[str]) -> None:
        assert lanes == self.lanes
        self.reported += finished

    def leave(self) -> None:
        self.left += 1


def test_each_link_hears_of_its_own() -> None:
    handle = Transfer(peer="p", operation="write", backend="tcp", nbytes=1, deadline=0.0)
    links = [Link(["a", "b"]), None, Link([]), Link(["c"])]
    several = SeveralLinks(links)  # type: ignore[arg-type]
    assert several.progress(handle, 0.1)
    reported = [link.reported for link in links if link is not None]
    assert reported == [[("a item", 0, None), ("b item", 0, None)], [], [("c item", 0, None)]]
    several.leave()
    assert [link.left for link in links if link is not None] == [1, 1, 1]
    assert not SeveralLinks([None, Link([])]).progress(handle, 0.1)  # type: ignore[list-item]
