"""Puts to a disk in places that were had ahead: begun before the master is asked, and as exact."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore import KVStoreError, MasterUnavailable, PutOutcome
from kvstore.client import block_writer, disk_places, writing
from kvstore.master import opening
from kvstore.wire import messages as m
from tests.support.disk_calls import replace
from tests.support.hanging_disk import HangingDisk
from tests.support.waits import eventually
from tests.unit.kvstore.test_disk_puts_in_parts import SIZE, Scene, fresh
from transfer import StorageFailed
from transfer.backends import direct_io

STORED, EXISTS, CONFLICT = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.CONFLICT
AHEAD = 6  # blocks of a put that are begun early
COUNT = 20
WAIT_S = 30.0


@pytest.fixture(params=["near", "far"])
def scene(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> Scene:
    """A client that holds places, with portions of four blocks."""
    monkeypatch.setattr(block_writer, "FIRST_BYTES", 4 * SIZE)
    monkeypatch.setattr(block_writer, "PORTION_BYTES", 4 * SIZE)
    monkeypatch.setattr(writing, "COMMIT_BYTES", 4 * SIZE)
    monkeypatch.setattr(disk_places, "AHEAD_BYTES", AHEAD * SIZE)
    monkeypatch.setattr(opening, "DISK_SHARE", 0.25)
    scene = Scene(tmp_path, stack, monkeypatch, request.param)
    assert set(scene.put(fresh(COUNT))) == {STORED}
    assert held(scene) == AHEAD
    scene.asked.clear()
    return scene


def held(scene: Scene) -> int:
    return scene.pool.master.statistics().open_bytes // SIZE


def forgotten_at_rest(scene: Scene) -> None:
    """Nothing is open after the client's places were given back."""
    assert scene.client.core.under_way.num_live() == 0
    scene.client._disk_places._drop(time.monotonic() + 1.0)
    scene.client._disk_places._tell_all()
    statistics = scene.pool.master.statistics()
    assert statistics.open_bytes == statistics.quarantined_bytes == statistics.open_puts == 0
    scene.pool.master.check_invariants()


def told(scene: Scene) -> set[bytes]:
    """The keys of which the node has heard."""
    return {block.key for block in scene.pool.node.segment(0).index.blocks()}


def test_the_first_blocks_are_begun_first_and_committed_last(scene, monkeypatch) -> None:
    begun: list[int] = []
    write = scene.client.core.engine.write

    def noted(*arguments, **options):
        begun.append(len(scene.of(m.Allocate)))
        return write(*arguments, **options)

    monkeypatch.setattr(scene.client.core.engine, "write", noted)
    keys = fresh(COUNT)
    assert set(scene.put(keys)) == {STORED}
    (asked,) = scene.of(m.Allocate)
    assert len(asked.places) == AHEAD == len(asked.more)
    assert begun[0] == 0
    assert begun[-1] == 1
    finishes = scene.of(m.Finish)
    assert len(finishes) > 1, "some was committed while other portions were written"
    assert finishes[-1].committed[:AHEAD] == list(range(AHEAD))
    committed = [row for finish in reversed(finishes) for row in finish.committed]
    assert committed == list(range(COUNT))
    scene.check_found(keys, COUNT)
    assert held(scene) == AHEAD
    forgotten_at_rest(scene)


def test_a_short_put_is_all_early(scene) -> None:
    for _ in range(5):
        keys = fresh(AHEAD)
        assert set(scene.put(keys)) == {STORED}
        assert len(scene.of(m.Allocate)[-1].places) == AHEAD
    scene.check_found(keys, AHEAD)
    forgotten_at_rest(scene)


def test_what_is_there_is_not_told_and_then_puts_ask_first(scene) -> None:
    keys = fresh(COUNT)
    early, late = keys[2], keys[AHEAD + 3]
    assert scene.client.put([early], scene.region, [2 * SIZE], SIZE) == (STORED,)
    assert scene.client.put([late], scene.region, [0], SIZE) == (STORED,)
    scene.asked.clear()
    outcomes = scene.put(keys)
    assert scene.of(m.Allocate)[0].places
    assert outcomes[2] is EXISTS
    assert outcomes[AHEAD + 3] is CONFLICT
    assert outcomes.count(STORED) == COUNT - 2
    blocks = [block.key for block in scene.pool.node.segment(0).index.blocks()]
    assert blocks.count(early) == 1, "the node has not heard of what was written in vain"
    again = scene.put(keys)
    assert not scene.of(m.Allocate)[-1].places, "it may be there again"
    assert again.count(EXISTS) == COUNT - 1
    assert set(scene.put(fresh(COUNT))) == {STORED}
    assert set(scene.put(fresh(COUNT))) == {STORED}
    assert len(scene.of(m.Allocate)[-1].places) == AHEAD
    forgotten_at_rest(scene)


def test_a_key_twice_is_not_begun_early(scene) -> None:
    keys = fresh(COUNT)
    keys[4] = keys[1]
    outcomes = scene.put(keys)
    assert not scene.of(m.Allocate)[0].places
    assert outcomes[4] is PutOutcome.IN_PROGRESS
    assert outcomes.count(STORED) == COUNT - 1
    forgotten_at_rest(scene)


def test_places_that_the_master_has_taken_back_are_written_elsewhere(scene) -> None:
    def answer(request: m.Request) -> None:
        if isinstance(request, m.Allocate) and request.places:
            back = m.Reserve(request.client, request.keys[0], abandoned=request.places[1:4])
            scene.pool.master._step(back)
            fired.append(request)

    fired: list[m.Request] = []
    scene.answer = answer
    keys = fresh(COUNT)
    assert set(scene.put(keys)) == {STORED}
    assert fired
    scene.answer = lambda request: None
    scene.check_found(keys, COUNT)
    forgotten_at_rest(scene)


@pytest.mark.parametrize("how", ["not asked", "no reply"])
def test_without_an_answer_places_stay_the_writers_until_the_disk_is_done(
    scene, monkeypatch, how
) -> None:
    disk, keys, fired = HangingDisk(monkeypatch), fresh(COUNT), threading.Event()
    places: list[int] = []

    def answer(request: m.Request) -> None:
        if isinstance(request, m.Allocate) and request.places and not fired.is_set():
            assert disk.entered.wait(WAIT_S)
            if how == "no reply":
                scene.pool.master._step(request)
            places.extend(request.places)
            fired.set()
            raise MasterUnavailable(operation="put", address="nowhere", problem="unplugged")

    scene.answer = answer
    with ThreadPoolExecutor(1) as pool:
        try:
            put = pool.submit(scene.put, keys)
            assert fired.wait(WAIT_S)
            assert not wait([put], timeout=0.5).done, "the disk may still write there"
            assert not scene.client.core.record.abandoned()
            assert not set(places) & set(scene.client._disk_places.untold(0))
            assert held(scene) >= AHEAD
            assert scene.client.core.under_way.num_live()
        finally:
            disk.let_go()
        with pytest.raises(KVStoreError):
            put.result(WAIT_S)
    assert not set(keys) & told(scene), "nobody had granted them"
    assert set(scene.put(keys)) == {STORED}
    scene.check_found(keys, COUNT)
    forgotten_at_rest(scene)


def test_a_disk_that_fails_where_it_was_begun_early(scene, monkeypatch) -> None:
    plain, fired = direct_io.write_fully, []
    mark = scene.bytes[SIZE : SIZE + 64].numpy().tobytes()

    def write(fd, places, low, *others):
        if any(bytes(place[:64]) == mark for place in places):
            fired.append(low)
            raise StorageFailed("the slab", "write", "Input/output error")
        plain(fd, places, low, *others)

    replace(monkeypatch, write, writes=True)
    keys = fresh(COUNT)
    outcomes = scene.put(keys)
    assert fired
    failed = [i for i, outcome in enumerate(outcomes) if outcome is PutOutcome.FAILED]
    assert 1 in failed
    assert outcomes.count(STORED) == COUNT - len(failed)
    assert list(scene.client.exists(keys)) == [i not in failed for i in range(COUNT)]
    scene.pool.master.check_invariants()


def test_what_is_not_used_is_given_back(scene, monkeypatch) -> None:
    monkeypatch.setattr(scene.client._disk_places, "_idle_s", 0.05)
    assert set(scene.put(fresh(COUNT))) == {STORED}
    eventually(lambda: held(scene) == 0, "all is given back", timeout_s=WAIT_S)
    assert set(scene.put(fresh(COUNT))) == {STORED}
    scene.client._disk_places.close()
    assert held(scene) == 0


def test_while_another_put_keeps_the_disk_busy_one_asks_first(scene, monkeypatch) -> None:
    monkeypatch.setattr(disk_places, "BUSY_BYTES", COUNT * SIZE)
    disk = HangingDisk(monkeypatch)
    first, second = fresh(COUNT), fresh(COUNT)
    with ThreadPoolExecutor(2) as pool:
        try:
            puts = [pool.submit(scene.put, first)]
            eventually(lambda: len(scene.of(m.Allocate)) == 1, "it asks", timeout_s=WAIT_S)
            puts.append(pool.submit(scene.put, second))
            eventually(lambda: len(scene.of(m.Allocate)) == 2, "it asks too", timeout_s=WAIT_S)
        finally:
            disk.let_go()
        for put in puts:
            assert set(put.result(WAIT_S)) == {STORED}
    assert [len(asked.places) for asked in scene.of(m.Allocate)] == [AHEAD, 0]
    scene.check_found(first, COUNT)
    scene.check_found(second, COUNT)
    assert set(scene.put(fresh(COUNT))) == {STORED}
    assert len(scene.of(m.Allocate)[-1].places) == AHEAD, "nothing is counted any more"
    forgotten_at_rest(scene)
