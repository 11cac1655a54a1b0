"""Writers that are killed or stopped: their places come back by themselves, and no sooner."""

from __future__ import annotations

import secrets
import signal
import time
from itertools import product

import pytest

from configs.schema import TransferBackend
from tests.support.holding_writer import SIZE, Writer, lose, under_way
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually

KINDS = ("reserved", "batch", "written")
BACKENDS = (None, TransferBackend.TCP)


@pytest.mark.parametrize(("kind", "backend"), list(product(KINDS, BACKENDS)))
def test_what_a_killed_writer_held_is_free_without_an_administrator(stack, kind, backend):
    # What the kernel says of a process is enough; without it a put must be too old to be begun.
    pool = Pool(stack, open_put_s=600.0 if backend is None else 1.0, heartbeat_s=0.1)
    writer = Writer(pool, backend, kind)
    if backend is None or kind != "reserved":
        assert under_way(pool) > 0, "the fault needs places"
    free_bytes = pool.master.statistics().free_bytes + under_way(pool)
    node = pool.nodes[0]
    assert node._engine.peer(writer.name).backend == (backend or "shared_memory")
    writer.kill()
    eventually(lambda: under_way(pool) == 0, "its places are free again", timeout_s=WAIT_S)
    assert pool.master.statistics().free_bytes == free_bytes
    pool.master.check_invariants()
    # Places that it gave back as it was stopped are free before its node knows that it is dead.
    eventually(lambda: not node._segments[0].writers(), "nor has it a key", timeout_s=WAIT_S)
    eventually(lambda: not node._settlement.witness._processes, "forgotten", timeout_s=WAIT_S)


@pytest.mark.parametrize(("kind", "backend"), list(product(KINDS, BACKENDS)))
def test_of_a_stopped_writer_nothing_is_freed(stack, kind, backend):
    pool = Pool(stack, open_put_s=4.0, heartbeat_s=0.1)
    writer = Writer(pool, backend, kind)
    held = under_way(pool)
    writer.signal(signal.SIGSTOP)
    time.sleep(6.0)  # of several questions, and longer than a put may take
    assert under_way(pool) == held
    writer.signal(signal.SIGCONT)
    writer.pipe.send("go on")
    values, outcomes = writer.hear()
    # A batch whose time was over before its first byte is stored if it takes no time at all.
    assert set(outcomes) <= ({"stored", "failed"} if kind == "batch" else {"stored"})
    for (key, value), outcome in zip(values.items(), outcomes, strict=True):
        assert pool.store.get(key) == (value if outcome == "stored" else None)
    writer.kill()
    eventually(lambda: under_way(pool) == 0, "its places are free again", timeout_s=WAIT_S)
    pool.master.check_invariants()


def test_a_process_that_lives_keeps_what_it_has_mapped_though_its_link_is_cut(stack):
    pool = Pool(stack, open_put_s=1.0, heartbeat_s=0.1)
    writer = Writer(pool, None, "batch")
    held = under_way(pool)
    writer.signal(signal.SIGSTOP)
    lose(pool, writer.name)
    time.sleep(3.5)
    assert under_way(pool) == held
    pool.master.check_invariants()
    writer.kill()
    eventually(lambda: under_way(pool) == 0, "its places are free again", timeout_s=WAIT_S)


@pytest.mark.parametrize("kind", ["batch", "written"])
def test_a_stopped_writer_that_was_cut_off_spoils_nothing_when_it_wakes(stack, kind):
    pool = Pool(stack, open_put_s=1.0, heartbeat_s=0.1)
    writer = Writer(pool, TransferBackend.TCP, kind)
    assert under_way(pool) >= 4 * SIZE
    writer.signal(signal.SIGSTOP)
    lose(pool, writer.name)
    eventually(lambda: under_way(pool) == 0, "what is late is free", timeout_s=WAIT_S)
    others = {secrets.token_bytes(16): secrets.token_bytes(SIZE) for _ in range(100)}
    pool.store.put_batch(list(others), list(others.values()))
    writer.signal(signal.SIGCONT)
    writer.pipe.send("go on")
    values, outcomes = writer.hear()
    for (key, value), outcome in zip(values.items(), outcomes, strict=True):
        assert outcome in ("stored", "failed"), outcomes
        if outcome == "stored":
            assert pool.store.get(key) == value
    assert {key: pool.store.get(key) for key in others} == others
    writer.kill()
    eventually(lambda: under_way(pool) == 0, "its places are free again", timeout_s=WAIT_S)
    pool.master.check_invariants()
