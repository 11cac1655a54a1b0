"""NIXL over UCX, memory to memory; a progress thread at the target only, prepared transfers.

    python nixl_transfer.py tcp|shared_memory

A progress thread spins. The initiator polls while it waits and needs none; without one at the
target nothing would move there.
"""

from __future__ import annotations

import base64
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import exchange
import numpy as np

TRANSPORTS = {"tcp": "tcp,self", "shared_memory": "sysv,posix,cma,self,tcp"}
WAIT_S_MAX = 60.0


def agent(name: str, memory: Any, *, progress: bool) -> Any:
    """An agent that knows the memory."""
    from nixl._api import nixl_agent, nixl_agent_config

    logging.disable(logging.WARNING)
    made = nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=progress))
    made.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return made


class NixlSide:
    """One pair of agents."""

    def __init__(self, transport: str) -> None:
        self._target = exchange.start_target(__file__, transport)
        told = exchange.answer(self._target)
        self._memory = exchange.filled(exchange.WINDOW_BYTES, 1)
        self._agent = agent("initiator", self._memory, progress=False)
        self._peer = self._agent.add_remote_agent(base64.b64decode(told["metadata"]))
        self._base = told["base"]
        self._handle: Any = None
        self.pids = [os.getpid(), self._target.pid]

    def local(self) -> Any:
        return self._memory

    def remote(self, offset: int, nbytes: int) -> bytes:
        # A completed write may be under way still: the check is not of when, but of what.
        time.sleep(0.05)
        return exchange.ask_bytes(self._target, offset, nbytes)

    def operation(self, request: dict[str, Any], local: Any, remote: Any) -> Callable[[], None]:
        if self._handle is not None:
            self._handle.release()
        made = self._agent
        sides = [
            made.get_xfer_descs(
                np.stack(
                    [offsets + base, np.full_like(offsets, request["size"]), 0 * offsets], axis=1
                ).astype(np.uint64),
                "DRAM",
            )
            for offsets, base in ((local, self._memory.ctypes.data), (remote, self._base))
        ]
        self._handle = handle = made.initialize_xfer(request["op"].upper(), *sides, self._peer)

        def go() -> None:
            state = made.transfer(handle)
            begin = time.monotonic() if state == "PROC" else 0.0
            while state == "PROC":
                state = made.check_xfer_state(handle)
                if state == "PROC" and time.monotonic() - begin > WAIT_S_MAX:
                    break
            if state != "DONE":
                raise RuntimeError(f"state {state}")

        return go


def target() -> None:
    """Hold memory."""
    memory = exchange.filled(exchange.WINDOW_BYTES, 7)
    held = agent("target", memory, progress=True)
    metadata = base64.b64encode(held.get_agent_metadata()).decode()
    exchange.say({"metadata": metadata, "base": memory.ctypes.data})
    exchange.serve_bytes(memory)
    os._exit(0)


if __name__ == "__main__":
    os.environ.update(
        UCX_TLS=TRANSPORTS[sys.argv[-1]], UCX_NET_DEVICES="lo", CUDA_VISIBLE_DEVICES=""
    )
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    if sys.argv[1] == "target":
        target()
    else:
        exchange.serve(NixlSide(sys.argv[1]))
