"""A client in a process of its own that reads a value in place, as its parent sees it."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from configs.schema import KVStoreConfig
from kvstore import LeaseLost, Store
from tests.support.fork_server import CONTEXT
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually


def view_and_wait(
    pipe: Connection, addresses: list[str], secret: bytes, config: KVStoreConfig, name: str
) -> None:
    """View a value, say whether in place and its bytes; then do as told."""
    with Store.connect(addresses, secret=secret, config=config) as store:
        viewing = store.view(name)
        view = viewing.__enter__()
        assert view is not None
        pipe.send((view.in_place, bytes(view.memory)))
        while (request := pipe.recv()) != "end":
            assert request == "bytes", request
            pipe.send(bytes(view.memory))
        try:
            viewing.__exit__(None, None, None)
        except LeaseLost:
            pipe.send("lost")
        else:
            pipe.send("held")


class Viewer:
    """The parent's end of it; a context manager."""

    def __init__(self, pool: Pool, name: str) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        args = (theirs, pool.addresses, pool.secret, pool.config, name)
        self._process = CONTEXT.Process(target=view_and_wait, args=args, daemon=True)
        self._process.start()
        theirs.close()
        self.in_place, self.value = self._hear()

    def ask(self, request: str) -> Any:
        self._pipe.send(request)
        return self._hear()

    def signal(self, number: int) -> None:
        pid = self._process.pid
        assert pid is not None
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            stat = Path(f"/proc/{pid}/stat")
            eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "stopped")

    def kill(self) -> None:
        self._process.kill()
        self._process.join(WAIT_S)
        assert self._process.exitcode == -signal.SIGKILL

    def _hear(self) -> Any:
        assert self._pipe.poll(WAIT_S), "the viewer does not answer"
        return self._pipe.recv()

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self.signal(signal.SIGCONT)
        self._process.join(WAIT_S)
        self._pipe.close()
        if self._process.is_alive():
            self.kill()
