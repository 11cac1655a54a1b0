"""A client that is killed right after a put: what it stored is known, what it held comes back."""

from __future__ import annotations

import signal
from contextlib import ExitStack

from kvstore import MasterServer, MasterUnavailable
from tests.support.doomed_writer import put_and_die
from tests.support.fork_server import CONTEXT
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually

SIZE = 4096


class Doomed:
    """The parent's end of a writer that dies."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        args = theirs, pool.addresses[0], pool.secret, pool.config, number, SIZE
        self.process = CONTEXT.Process(target=put_and_die, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self.name, self.values, self.short, self.held = self._recv()

    def die(self) -> None:
        """Let it put one value more and be killed; `values` has all that it stored."""
        self.pipe.send("die")
        key, data = self._recv()
        self.process.join(WAIT_S)
        assert self.process.exitcode == -signal.SIGKILL
        self.values[key] = data

    def _recv(self):
        assert self.pipe.poll(WAIT_S), "the writer does not answer"
        return self.pipe.recv()


def bear_no_witness(pool: Pool) -> None:
    """As a node that cannot tell when a process ends; see `test_writers_that_end.py` for others."""
    pool.nodes[0]._settlement.witness.is_due = lambda now: False


def test_what_it_stored_is_known_and_what_it_held_comes_back(stack):
    masters = stack.enter_context(ExitStack())
    pool = Pool(stack, open_put_s=5.0, heartbeat_s=0.1)
    bear_no_witness(pool)
    free_bytes = pool.master.statistics().free_bytes
    doomed = Doomed(pool, 5)
    assert doomed.short, "the fault needs a put without a note that is sent"
    assert doomed.held > 1, "and places that are held"
    held = pool.master.statistics().open_bytes
    assert held == doomed.held * SIZE
    doomed.die()
    pool.master.fence([doomed.name])
    figures = pool.master.statistics()
    assert (figures.open_bytes, figures.quarantined_bytes) == (0, held - SIZE)
    pool.master.confirm_dead([doomed.name])
    figures = pool.master.statistics()
    assert (figures.open_bytes, figures.quarantined_bytes) == (0, 0)
    assert figures.free_bytes == free_bytes - len(doomed.values) * SIZE
    pool.master.check_invariants()

    port = int(pool.master.address.rpartition(":")[2])
    pool.master.close()
    pool.master = masters.enter_context(MasterServer(pool.config, secret=pool.secret, port=port))
    eventually(lambda: pool.master.statistics().nodes == 1, "the node registers again")

    def answers():
        try:
            pool.store.exists(bytes(16))
        except MasterUnavailable:  # a moment after one that was silent it is not asked
            return False
        return True

    eventually(answers, "the store has found the new master")
    assert {key: pool.store.get(key) for key in doomed.values} == doomed.values
    assert doomed.name not in pool.nodes[0]._mailboxes._boxes, "its mailbox is gone with it"
    assert pool.store.remove_batch(list(doomed.values)) == len(doomed.values)
    eventually(lambda: pool.master.statistics().free_bytes == free_bytes, "every byte is free")
    pool.master.check_invariants()


def test_unless_somebody_says_that_it_is_dead_its_places_are_quarantined(stack):
    pool = Pool(stack, open_put_s=3.0, heartbeat_s=0.1)
    bear_no_witness(pool)
    doomed = Doomed(pool, 5)
    doomed.die()

    def lapsed():
        pool.store.exists("anything")  # time passes with requests
        figures = pool.master.statistics()
        return figures.open_bytes == 0 and figures.quarantined_bytes > 0

    eventually(lapsed, "its places are given to nobody else")
    pool.master.confirm_dead([doomed.name])
    assert pool.master.statistics().quarantined_bytes == 0
    assert {key: pool.store.get(key) for key in doomed.values} == doomed.values
    pool.master.check_invariants()
