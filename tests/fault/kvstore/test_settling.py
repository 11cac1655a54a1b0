"""A master killed in the midst of puts: the next places again as soon as all writers rest."""

from __future__ import annotations

import os
import secrets
import signal
import time

import pytest

from configs.schema import TransferBackend
from kvstore.wire import messages as m
from tests.support.master_process import WAIT_S, MasterCluster, find, write_on

PUT_S = 120.0  # what a put may take: nobody waits for its end here


def fresh_keys(number: int) -> list[bytes]:
    return [secrets.token_bytes(16) for _ in range(number)]


class Held:
    """Two workers; one holds a grant in the segment of the other, of a master that was killed."""

    def __init__(self, stack, **knobs):
        self.cluster = MasterCluster(
            stack, workers=2, open_put_s=PUT_S, request_timeout_s=40.0, **knobs
        )
        self.slow, self.quick = self.cluster.workers
        for worker in self.cluster.workers:  # nobody's segment is untouched
            assert worker.ask("put", fresh_keys(1)) == ["stored"]
        self.keys = fresh_keys(4)
        self.slow.begin("put_pausing", self.keys)
        assert self.slow.pipe.poll(WAIT_S)
        assert self.slow.pipe.recv() == "writing"
        self.cluster.masters[0].kill()
        self.cluster.restart_master(0)
        self.started_s = time.monotonic()
        while self.cluster.figures().nodes < 2:
            assert time.monotonic() < self.started_s + WAIT_S
            time.sleep(0.02)
        self._batch = 0

    def place_beside_the_writer(self) -> bool:
        """Whether the master gives out space where the slow one may write; gives it back."""
        self._batch += 1
        request = m.Allocate(
            "tester", self._batch, fresh_keys(1), [64], [0], avoid=[self.slow.name]
        )
        reply = self.cluster.map.ask(request, m.Allocated)
        if reply.outcomes == [m.PutOutcome.GRANTED]:
            assert [where.node for where in reply.nodes] == [self.quick.name]
            self.cluster.map.ask(m.Finish("tester", self._batch, [], aborted=[0]), m.Finished)
            return True
        assert reply.outcomes == [m.PutOutcome.NO_SPACE]
        assert reply.provisional
        return False

    def never_placed_for(self, seconds: float) -> bool:
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            if self.place_beside_the_writer():
                return False
            time.sleep(0.05)
        return True

    def wait_until_placed(self) -> None:
        while not self.place_beside_the_writer():
            assert time.monotonic() < self.started_s + PUT_S / 2
            time.sleep(0.02)


def test_nobody_is_placed_where_a_writer_of_the_dead_master_is_held(stack):
    held = Held(stack)
    keys = fresh_keys(8)
    # Where nobody is held space is given out at once, and elsewhere not at all.
    assert held.quick.ask("put", keys) == ["stored"] * 8
    found, good, equal, places = held.quick.ask("get", keys)
    assert (found, good, equal, set(places)) == (8, 8, True, {held.slow.name})
    assert held.never_placed_for(3.0)
    held.slow.pipe.send("go on")  # its bytes land where the dead master meant them to
    assert held.slow.result() == ["stored"] * 4  # after a second try, at the new master
    held.wait_until_placed()
    assert held.quick.ask("get", held.keys)[:3] == (4, 4, True)
    assert held.quick.ask("get", keys)[:3] == (8, 8, True)
    figures = held.cluster.figures()
    assert (figures.blocks, figures.corrupt_blocks, figures.open_puts) == (14, 0, 0)


def test_a_writer_killed_while_it_holds_a_grant(stack):
    """It cannot answer; over tcp no node tells. That it is certainly dead is as good."""
    held = Held(stack, backend=TransferBackend.TCP)
    held.slow.kill()
    assert held.never_placed_for(3.0)
    held.cluster.map.ask(m.Fence([held.slow.name], dead=False), m.Done)
    assert held.never_placed_for(1.0), "fenced is not dead"
    held.cluster.map.ask(m.Fence([held.slow.name], dead=True), m.Done)
    held.wait_until_placed()
    figures = held.cluster.figures()
    assert (figures.nodes, figures.open_puts, figures.quarantined_bytes) == (1, 0, 0)


def test_that_a_process_of_the_host_was_killed_the_node_knows(stack):
    held = Held(stack)
    held.slow.kill()
    held.wait_until_placed()
    held.cluster.map.ask(m.Fence([held.slow.name], dead=True), m.Done)
    figures = held.cluster.figures()
    assert (figures.nodes, figures.open_puts, figures.quarantined_bytes) == (1, 0, 0)


def test_a_writer_stopped_while_it_holds_a_grant(stack):
    held = Held(stack)
    os.kill(held.slow.process.pid, signal.SIGSTOP)
    try:
        assert held.never_placed_for(3.0)
    finally:
        os.kill(held.slow.process.pid, signal.SIGCONT)
    assert held.never_placed_for(1.0), "it holds the grant still"
    held.slow.pipe.send("go on")
    assert held.slow.result() == ["stored"] * 4
    held.wait_until_placed()
    assert held.quick.ask("get", held.keys)[:3] == (4, 4, True)


@pytest.mark.parametrize("shards", [1, 2])
def test_puts_go_on_soon_after_a_master_is_back(stack, shards):
    """Writers without end, a master that dies and comes back: no put waits for `open_put_s`."""
    cluster = MasterCluster(stack, shards=shards, open_put_s=PUT_S, request_timeout_s=30.0)
    writers = cluster.workers
    for writer in writers:
        writer.begin("run", write_on, 4)
    time.sleep(1.5)
    cluster.masters[-1].kill()
    killed_s = time.monotonic()
    cluster.restart_master(shards - 1)
    down_s = time.monotonic() - killed_s
    time.sleep(6.0)
    stored = []
    for writer in writers:
        theirs, other, longest_s = writer.enough()
        assert other == []
        assert longest_s < down_s + PUT_S / 4
        stored += theirs
    cluster.wait_blocks(len(stored))
    # Each of them looks for a share, so that this takes no longer than the puts have.
    shares = [stored[idx :: len(writers)] for idx in range(len(writers))]
    for writer, share in zip(writers, shares, strict=True):
        writer.begin("run", find, share)
    assert [writer.result() for writer in writers] == [len(share) for share in shares]
    figures = cluster.figures()
    assert (figures.corrupt_blocks, figures.open_puts, figures.quarantined_bytes) == (0, 0, 0)


def test_a_client_that_left_is_not_waited_for(stack):
    """It gave its keys back, and its process is gone before the master is."""
    cluster = MasterCluster(stack, workers=3, open_put_s=PUT_S, request_timeout_s=40.0)
    leaver, first, second = cluster.workers
    for worker in cluster.workers:
        assert worker.ask("put", fresh_keys(4)) == ["stored"] * 4
    leaver.pipe.send(None)
    leaver.process.join(WAIT_S)
    assert leaver.process.exitcode == 0
    cluster.masters[0].kill()
    cluster.restart_master(0)
    started_s = time.monotonic()
    keys = fresh_keys(8)
    assert first.ask("put", keys) == ["stored"] * 8
    assert time.monotonic() - started_s < PUT_S / 2
    assert second.ask("get", keys)[:3] == (8, 8, True)
