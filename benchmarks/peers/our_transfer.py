"""Our engine, driven as the peers are.

python our_transfer.py tcp|shared_memory
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exchange
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import secrets

from moe_runtime.bench.remote import (
    NotifyRemote,
    fresh_secret,
    open_window,
    target_process,
)
from moe_runtime.bench.session import Setup
from transfer import TransferEngine, allocate


class OurSide:
    """One pair of engines, as `moe-runtime bench transfer` makes them."""

    def __init__(self, backend: str) -> None:
        config = Setup(backend=backend).config()
        secret = fresh_secret()
        self._process = target_process(config, secret, None)
        target = self._process.__enter__()
        self._engine = TransferEngine(config, name=secrets.token_hex(8), secret=secret)
        remote = NotifyRemote(self._engine, ending=target.ending)
        self._engine.open()
        peer = self._engine.connect(target.address)
        remote.bind(peer)
        self._peer = peer.name
        self._region = self._engine.register(allocate(exchange.WINDOW_BYTES))
        self._region.array[:] = exchange.filled(exchange.WINDOW_BYTES, 1)
        self._key, self._witness = open_window(remote, exchange.WINDOW_BYTES, private=False)
        self.pids = [os.getpid(), target.process.pid]

    def local(self) -> Any:
        return self._region.array

    def remote(self, offset: int, nbytes: int) -> bytes:
        # A look at the target's memory itself, right after the operation has ended.
        assert self._witness is not None
        return self._witness.array[offset : offset + nbytes].tobytes()

    def operation(self, request: dict[str, Any], local: Any, remote: Any) -> Callable[[], None]:
        engine, peer, region, key = self._engine, self._peer, self._region, self._key
        single = request["blocks"] == 1
        here: Any = int(local[0]) if single else local
        there: Any = int(remote[0]) if single else remote
        size: Any = request["size"] if single else np.full(request["blocks"], request["size"])
        if request["op"] == "read":
            return lambda: engine.read(peer, region, key, here, there, size).wait()
        if request.get("prepared"):
            post = engine.prepare_write(peer, region, key, here, there, size).post
            return lambda: post().wait()
        return lambda: engine.write(peer, region, key, here, there, size).wait()


if __name__ == "__main__":
    exchange.serve(OurSide(sys.argv[1]))
