"""The end that holds memory: answers the initiator, and takes no part in what is measured.

As a process of its own it reads its settings from standard input (so the secret is on no command
line) and writes its address to standard output.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from configs.schema import TransferConfig
from moe_runtime.bench.messages import (
    Clocks,
    Compare,
    Compared,
    Done,
    Failed,
    Fill,
    Open,
    Opened,
    Reply,
    Request,
    decode_request,
    encode,
)
from moe_runtime.bench.usage import pin, usage_now
from moe_runtime.bench.workload import Placement, differing_piece, fill
from moe_runtime.parent import die_with_parent
from transfer import Access, Memory, Region, RegionKey, TransferEngine, TransferError, allocate

#: instead of an address: why there is none
NOT_OPENED: Final = "! "

#: asked for and not yet answered, of all initiators
REQUESTS_MAX: Final = 256


class TargetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a spawned target is set up.

    Attributes:
        config: a `TransferConfig` as JSON values.
        secret: of the run.
        cores: where it may run; None for anywhere.
    """

    config: dict[str, object]
    secret: bytes
    cores: list[int] | None


class Holding:
    """The window of one initiator. Used by one thread."""

    def __init__(self, engine: TransferEngine, peer: str) -> None:
        self._engine = engine
        self._peer = peer
        self._memory: Memory | None = None
        self._region: Region | None = None
        self._key: RegionKey | None = None

    def answer(self, request: Request) -> Reply:
        """Do what is asked; what fails is said, not raised."""
        try:
            return self._answer(request)
        except (OSError, ValueError, IndexError, RuntimeError, TransferError) as error:
            return Failed(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Withdraw the window and let its memory go."""
        if self._region is not None:
            self._engine.release(self._region)
        if self._memory is not None:
            self._memory.close()
        self._region = self._memory = None

    def _answer(self, request: Request) -> Reply:
        if isinstance(request, Open):
            return self._open(request)
        if isinstance(request, Fill):
            fill(self._array(), _ints(request.offsets), request.size, request.seed)
            return Done()
        if isinstance(request, Compare):
            source, target = _ints(request.source), _ints(request.target)
            placement = Placement(source=source, target=target, size=request.size)
            piece = differing_piece(self._array(), placement, request.seed)
            return Compared(-1 if piece is None else piece)
        return Clocks(usage_now())

    def _open(self, request: Open) -> Opened:
        self.close()
        if request.private:
            # Written once, so that no page is new when the clock runs.
            self._region = self._engine.register(torch.ones(request.nbytes, dtype=torch.uint8))
        else:
            self._memory = allocate(request.nbytes)
            self._region = self._engine.register(self._memory)
        access = Access.READ | Access.WRITE
        key = self._engine.offer(self._region, to=self._peer, access=access)
        descriptor = -1 if self._memory is None else self._memory.fd
        return Opened(key.encode(), boot_id(), os.getpid(), descriptor)

    def _array(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if self._region is None:
            raise ValueError("no window is open")
        return self._region.array


class TargetService:
    """An engine whose peers get a window each. One thread runs it; `stop` is thread-safe."""

    def __init__(self, config: TransferConfig, secret: bytes) -> None:
        self._events: queue.Queue[tuple[str, bytes]] = queue.Queue(REQUESTS_MAX)
        self._lost: set[str] = set()
        self.engine = TransferEngine(config, name=secrets.token_hex(8), secret=secret)
        self.engine.on_notify(self._note)
        self.engine.on_peer_lost(self._lose)

    def run(self, *, until_left: bool) -> None:
        """Answer initiators, for ever or until the first one that was here has gone."""
        holdings: dict[str, Holding] = {}
        with contextlib.ExitStack() as stack:
            while True:
                peer, payload = self._events.get()
                for name in list(self._lost):
                    self._lost.discard(name)
                    if (left := holdings.pop(name, None)) is not None:
                        left.close()
                    if until_left:
                        return
                if not payload:
                    continue
                if peer not in holdings:
                    holdings[peer] = Holding(self.engine, peer)
                    stack.callback(holdings[peer].close)
                self._reply(peer, holdings[peer], payload)

    def _reply(self, peer: str, holding: Holding, payload: bytes) -> None:
        try:
            reply: Reply = holding.answer(decode_request(payload))
        except msgspec.MsgspecError as error:
            reply = Failed(f"request not understood: {error}")
        # An initiator that is gone has no use for the answer; its loss is an event of its own.
        with contextlib.suppress(TransferError):
            self.engine.notify(peer, encode(reply))

    def _note(self, peer: str, payload: bytes) -> None:
        # On the engine's thread, which must not wait. A peer that floods us is not answered.
        with contextlib.suppress(queue.Full):
            self._events.put_nowait((peer, payload))

    def _lose(self, peer: str, evidence: str) -> None:
        self._lost.add(peer)  # seen at the next event, of which a full queue has plenty
        self._note(peer, b"")


def boot_id() -> str:
    """Tell hosts apart; "" where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@contextlib.contextmanager
def serving(config: TransferConfig, secret: bytes) -> Iterator[TargetService]:
    """Open a target's engine."""
    service = TargetService(config, secret)
    with service.engine:
        yield service


def _ints(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.frombuffer(data, dtype="<i8")


def main() -> None:
    """Be a target for the process that started this one."""
    die_with_parent()
    settings = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TargetSettings)
    if settings.cores is not None:
        pin(settings.cores)
    torch.set_num_threads(1)
    service = TargetService(TransferConfig.model_validate(settings.config), settings.secret)
    try:
        service.engine.open()
    except (TransferError, OSError) as error:
        # To who started us, who tells the user: no rails, no such address, no RDMA.
        sys.stdout.write(f"{NOT_OPENED}{' '.join(str(error).split())}\n")
        sys.exit(1)
    with contextlib.closing(service.engine):
        sys.stdout.write(service.engine.address + "\n")
        sys.stdout.flush()
        service.run(until_left=True)


if __name__ == "__main__":
    main()
