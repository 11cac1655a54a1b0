"""Mooncake's Transfer Engine over tcp, peer-to-peer handshake, connection pool on.

python mooncake_transfer.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import exchange

HOST = "127.0.0.1"
os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")  # off, each request is a connect
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("MC_TCP_BIND_ADDRESS", HOST)


def engine(memory: Any) -> Any:
    """An engine that knows the memory."""
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    if made.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("initialize failed")
    if made.register_memory(memory.ctypes.data, memory.nbytes) != 0:
        raise RuntimeError("register_memory failed")
    return made


class MooncakeSide:
    """One pair of engines."""

    def __init__(self) -> None:
        self._target = exchange.start_target(__file__)
        told = exchange.answer(self._target)
        self._name, self._base = told["name"], told["base"]
        self._memory = exchange.filled(exchange.WINDOW_BYTES, 1)
        self._engine = engine(self._memory)
        self.pids = [os.getpid(), self._target.pid]

    def local(self) -> Any:
        return self._memory

    def remote(self, offset: int, nbytes: int) -> bytes:
        return exchange.ask_bytes(self._target, offset, nbytes)

    def operation(self, request: dict[str, Any], local: Any, remote: Any) -> Callable[[], None]:
        here = (local + self._memory.ctypes.data).tolist()
        there = (remote + self._base).tolist()
        lengths = [request["size"]] * request["blocks"]
        name = self._name
        if request["blocks"] == 1:
            one = getattr(self._engine, f"transfer_sync_{request['op']}")
            arguments: tuple[Any, ...] = (name, here[0], there[0], lengths[0])
        else:
            one = getattr(self._engine, f"batch_transfer_sync_{request['op']}")
            arguments = (name, here, there, lengths)

        def go() -> None:
            if (status := one(*arguments)) != 0:
                raise RuntimeError(f"status {status}")

        return go


def target() -> None:
    """Hold memory."""
    memory = exchange.filled(exchange.WINDOW_BYTES, 7)
    held = engine(memory)
    exchange.say({"name": f"{HOST}:{held.get_rpc_port()}", "base": memory.ctypes.data})
    exchange.serve_bytes(memory)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["target"]:
        target()
    else:
        exchange.serve(MooncakeSide())
