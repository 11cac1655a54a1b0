"""Large puts to a disk: asked for in two parts, and committed while the rest is being written."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore import KVStoreError, MasterUnavailable, PutOutcome, StoreClient
from kvstore.client import block_writer, writing
from kvstore.wire import messages as m
from tests.support.disk_calls import replace
from tests.unit.kvstore.test_far_disks import WAIT_S, FarPool, found_again
from transfer import StorageFailed, allocate
from transfer.backends import direct_io

SIZE = 1 << 18
COUNT = 40


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Portions of four blocks, the first of two; a head of five, two of which come last."""
    monkeypatch.setattr(block_writer, "FIRST_BYTES", 2 * SIZE)
    monkeypatch.setattr(block_writer, "PORTION_BYTES", 4 * SIZE)
    monkeypatch.setattr(writing, "SPLIT_BYTES_MIN", 16 * SIZE)
    monkeypatch.setattr(writing, "HEAD_BYTES", 5 * SIZE)
    monkeypatch.setattr(writing, "LAST_BYTES", 2 * SIZE)
    monkeypatch.setattr(writing, "COMMIT_BYTES", 8 * SIZE)


class Scene:
    """A pool of one file, a client in the node's process or another, and what it asks."""

    def __init__(
        self, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, side: str
    ) -> None:
        self.pool = pool = FarPool(stack, tmp_path, SIZE)
        self.client, engine = pool.client, pool.engine
        if side == "near":
            engine, node = pool.node.engine, pool.node.node
            self.client = StoreClient(
                engine, pool.master.address, pool.node.config, secret=pool.secret,
                local_node=node,
            )  # fmt: skip
            engine.on_notify(
                lambda peer, note: node.on_notify(peer, note) or self.client.on_notify(peer, note)
            )
            stack.enter_context(self.client)
        memory = allocate(2 * COUNT * SIZE)
        stack.callback(memory.close)
        self.region = engine.register(memory)
        self.bytes = self.region.tensor
        self.bytes.random_(generator=torch.Generator().manual_seed(secrets.randbits(60)))
        self.asked: list[m.Request] = []
        self.answer: Callable[[m.Request], None] = lambda request: None
        assert self.put([secrets.token_bytes(16)]) == (PutOutcome.STORED,)  # it goes to a disk
        ask = self.client.driver.link.ask

        def noted(request, expected, **options):
            self.asked.append(request)
            self.answer(request)
            return ask(request, expected, **options)

        monkeypatch.setattr(self.client.driver.link, "ask", noted)

    def put(self, keys: list[bytes], **options: float) -> tuple[PutOutcome, ...]:
        return self.client.put(keys, self.region, np.arange(len(keys)) * SIZE, SIZE, **options)

    def of(self, kind: type) -> list:
        return [request for request in self.asked if isinstance(request, kind)]

    def check_found(self, keys: list[bytes], count: int) -> None:
        """The first so many are there, with the bytes that were put."""
        hit = found_again(self.client, keys)
        assert hit.num_blocks == count
        half = COUNT * SIZE
        targets = half + np.arange(count) * SIZE
        assert self.client.get_into(hit, self.region, targets) == count
        self.client.release(hit)
        assert torch.equal(self.bytes[: count * SIZE], self.bytes[half : half + count * SIZE])

    def check_nothing_left(self) -> None:
        assert self.client.core.under_way.num_live() == 0
        deadline = time.monotonic() + WAIT_S
        while True:  # what was given up is told with the next put
            self.put([secrets.token_bytes(16)])
            statistics = self.client.master_statistics()
            if statistics.open_puts == 0 == statistics.quarantined_bytes:
                break
            assert time.monotonic() < deadline, statistics
            time.sleep(0.05)
        self.pool.master.check_invariants()


@pytest.fixture(params=["near", "far"])
def scene(request, tmp_path, stack, monkeypatch) -> Scene:
    return Scene(tmp_path, stack, monkeypatch, request.param)


def fresh(count: int = COUNT) -> list[bytes]:
    return [secrets.token_bytes(16) for _ in range(count)]


def test_every_block_is_asked_for_and_committed_once_and_the_root_is_the_youngest(scene) -> None:
    keys = fresh()
    assert set(scene.put(keys)) == {PutOutcome.STORED}
    head, rest = scene.of(m.Allocate)
    assert (head.keys, rest.keys) == (keys[:5], keys[5:])
    finishes = scene.of(m.Finish)
    assert len(finishes) > 3, "some was committed while other portions were written"
    last = finishes[-1]
    assert last.batch == head.batch
    assert last.committed == list(range(5))
    of_rest = [finish for finish in finishes if finish.batch == rest.batch]
    assert len(of_rest) == len(finishes) - 1
    committed = [row for finish in reversed(of_rest) for row in finish.committed]
    assert committed == list(range(COUNT - 5))
    scene.check_found(keys, COUNT)
    scene.check_nothing_left()


def test_what_is_there_already_is_told_in_both_parts(scene) -> None:
    keys = fresh()
    assert set(scene.put(keys[3:9])) == {PutOutcome.STORED}
    shifted = np.arange(COUNT) * SIZE
    shifted[3:9] = np.arange(6) * SIZE
    shifted[:3] = np.arange(6, 9) * SIZE
    outcomes = scene.client.put(keys, scene.region, shifted, SIZE)
    assert outcomes[3:9] == (PutOutcome.EXISTS,) * 6
    assert set(outcomes[:3] + outcomes[9:]) == {PutOutcome.STORED}
    scene.check_nothing_left()


def test_a_key_twice_is_written_once(scene) -> None:
    keys = fresh()
    keys[30] = keys[2]  # in the other part
    outcomes = scene.put(keys)
    assert outcomes[30] is PutOutcome.IN_PROGRESS
    assert outcomes[:30] + outcomes[31:] == (PutOutcome.STORED,) * (COUNT - 1)
    scene.check_nothing_left()


@pytest.mark.parametrize("lost", ["second allocate", "first finish", "last finish"])
def test_a_master_that_is_not_reached_in_the_middle(scene, lost) -> None:
    fired = []

    def answer(request: m.Request) -> None:
        seen = len(scene.of(type(request)))
        kind, number = (m.Allocate, 2) if lost == "second allocate" else (m.Finish, 1)
        if lost == "last finish":
            is_it = isinstance(request, m.Finish) and request.batch == scene.of(m.Allocate)[0].batch
        else:
            is_it = isinstance(request, kind) and seen == number
        if is_it and not fired:
            fired.append(request)
            raise MasterUnavailable(operation="put", address="nowhere", problem="unplugged")

    scene.answer = answer
    keys = fresh()
    with pytest.raises(KVStoreError):
        scene.put(keys)
    assert fired
    scene.check_nothing_left()
    outcomes = scene.put(keys)
    assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.EXISTS}
    scene.check_found(keys, COUNT)


def test_a_disk_that_fails_at_one_portion(scene, monkeypatch) -> None:
    plain, fired = direct_io.write_fully, []
    mark = scene.bytes[20 * SIZE : 20 * SIZE + 64].numpy().tobytes()

    def write(fd, places, low, *others):
        if any(bytes(place[:64]) == mark for place in places):
            fired.append(low)
            raise StorageFailed("the slab", "write", "Input/output error")
        plain(fd, places, low, *others)

    replace(monkeypatch, write, writes=True)
    keys = fresh()
    outcomes = scene.put(keys)
    assert fired
    failed = [i for i, outcome in enumerate(outcomes) if outcome is PutOutcome.FAILED]
    assert 20 in failed
    assert len(failed) <= 4
    assert outcomes.count(PutOutcome.STORED) == COUNT - len(failed)
    scene.check_found(keys, failed[0])
    assert list(scene.client.exists(keys)) == [i not in failed for i in range(COUNT)]
    scene.pool.master.check_invariants()


def test_a_pool_that_is_full_keeps_what_comes_first(scene) -> None:
    pinned = fresh(COUNT)
    for part in (pinned, fresh(COUNT)):
        outcomes = scene.put(part)
        hit = scene.client.lookup_prefix(part)  # leased: not to be evicted
        assert hit.num_blocks == COUNT
        assert set(outcomes) == {PutOutcome.STORED}
    keys = fresh()
    outcomes = scene.put(keys)
    stored = outcomes.count(PutOutcome.STORED)
    assert 0 < stored < COUNT
    assert outcomes == (PutOutcome.STORED,) * stored + (PutOutcome.NO_SPACE,) * (COUNT - stored)
    scene.check_found(keys, stored)
    scene.pool.master.check_invariants()
