"""A client in a process of its own that holds places, as its parent sees it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from configs.schema import TransferBackend
from tests.support.fork_server import CONTEXT
from tests.support.killed_writer import begin_and_wait
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually

SIZE = 64 << 10


class Writer:
    """The parent's end of it; see `begin_and_wait`."""

    def __init__(self, pool: Pool, backend: TransferBackend | None, kind: str) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        args = (theirs, pool.addresses[0], pool.secret, pool.config, backend, kind, SIZE)
        self.process = CONTEXT.Process(target=begin_and_wait, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self.name = self.hear()

    def hear(self) -> Any:
        assert self.pipe.poll(WAIT_S), "the writer does not answer"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            stat = Path(f"/proc/{self.process.pid}/stat")
            eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "stopped")

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(WAIT_S)
        assert self.process.exitcode == -signal.SIGKILL


def under_way(pool: Pool) -> int:
    figures = pool.master.statistics()
    return figures.open_bytes + figures.quarantined_bytes


def lose(pool: Pool, name: str) -> None:
    """Cut the connection of the only node with a writer."""
    engine = pool.nodes[0]._engine
    link = engine._table.get(name)
    assert link is not None
    engine._loop.ask(lambda: engine._links.lose(link, "cut by the test"))
    assert engine._table.get(name) is None
