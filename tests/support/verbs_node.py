"""One side of RDMA without an engine: an event loop, a sprayer, and a pipe to the other side."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from transfer.backends.verbs.backend import VerbsBackend
from transfer.backends.verbs.domain import PeerDomain
from transfer.errors import EngineClosed
from transfer.event_loop import EventLoop
from transfer.handle import Transfer
from transfer.memory.region import Access, OfferTable, Region, RegionKey, make_offer
from transfer.pieces import make_pieces
from transfer.priority import Priority
from transfer.rails.rail import RailName
from transfer.rails.requests import Requests
from transfer.rails.slices import Operation
from transfer.statistics import Tally
from transfer.wire import RequestKind

CONTEXT = multiprocessing.get_context("fork")
SOON_S = 60.0
MESSAGE, WITHDRAWN = b"m", b"w"


class VerbsNode:
    """What an engine does for one peer, in one process."""

    def __init__(self, name: str, peer: str, devices: tuple[str, ...], pipe: Connection) -> None:
        self.name, self.peer, self.devices = name, peer, devices
        self.counted: Counter[int] = Counter()
        self.tally = Tally()
        self._pipe = pipe
        self._sending = threading.Lock()
        self.loop = EventLoop(name, on_tick=self._on_tick)
        self.offers = OfferTable(name)
        self.backend = VerbsBackend(self.offers, self.loop)
        ends = self.backend.open(devices, lambda _: "")
        assert tuple(end.name for end in ends) == devices
        self.loop.start()
        self.loop.ask(self.backend.start)
        self.exchange = self.loop.ask(
            lambda: self.backend.connect(
                peer,
                tuple(map(str, range(len(devices)))),
                send=self._send,
                count=self._count,
                on_tried=lambda: None,
            )
        )
        self.requests = Requests(
            peer,
            self.loop,
            self.tally,
            num_rails=len(devices),
            prefer=lambda region: (),
            shares=dict.fromkeys(Priority, 1.0),
            open_rail=self._open_rail,
            orders_immediates=False,
        )
        self._reader = threading.Thread(target=self._read, name="reader")
        self._reader.start()

    def offer(self, region: Region, access: Access, offset: int = 0, nbytes: int | None = None,
              to: str | None = None) -> RegionKey:  # fmt: skip
        offer = make_offer(region, to=to or self.peer, access=access, offset=offset, nbytes=nbytes)
        return self.offers.add(offer)

    def withdraw(self, key: RegionKey) -> None:
        self.offers.withdraw(key.token)
        self.exchange.withdraw(key.token)
        with self._sending:
            self._pipe.send_bytes(WITHDRAWN + key.token)

    def write(self, source: Region, key: RegionKey, source_offsets: Any, target_offsets: Any,
              lengths: Any, **options: Any) -> Transfer:  # fmt: skip
        pieces = make_pieces(source_offsets, target_offsets, lengths)
        return self._submit(RequestKind.WRITE, source, key, pieces, **options)

    def read(self, target: Region, key: RegionKey, target_offsets: Any, source_offsets: Any,
             lengths: Any, **options: Any) -> Transfer:  # fmt: skip
        pieces = make_pieces(source_offsets, target_offsets, lengths)
        return self._submit(RequestKind.READ, target, key, pieces, **options)

    def _submit(self, kind: RequestKind, region: Region, key: RegionKey, pieces: Any, *,
                immediate: int | None = None, timeout_s: float = SOON_S,
                priority: Priority = Priority.KV_PUT) -> Transfer:  # fmt: skip
        handle = Transfer(
            peer=self.peer, operation=kind.name.lower(), backend="verbs", nbytes=pieces.nbytes,
            deadline=time.monotonic() + timeout_s,
        )  # fmt: skip
        operation = Operation(kind=kind, handle=handle, token=key.token, region=region,
                              immediate=immediate, priority=priority)  # fmt: skip
        self.requests.submit(operation, pieces)
        return handle

    def await_count(self, immediate: int, count: int, timeout_s: float = SOON_S) -> int:
        deadline = time.monotonic() + timeout_s
        while self.counted[immediate] < count and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.counted[immediate]

    def close(self) -> None:
        self.loop.ask(lambda: self.requests.close(EngineClosed("closed")))
        self.loop.ask(self.backend.close)
        descriptor = os.dup(self._pipe.fileno())
        # Wakes the reader; the other side may be gone.
        with socket.socket(fileno=descriptor) as sock, contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        self._reader.join(SOON_S)  # before the loop, which it calls
        self._pipe.close()
        self.loop.stop()

    def _open_rail(self, idx: int, done: Any) -> None:
        name = RailName("verbs", self.devices[idx], str(idx))
        self.exchange.open_rail(name, self.requests, done)

    def _on_tick(self, now: float) -> bool:
        if hasattr(self, "requests"):
            self.requests.expire(now)
            self.exchange.expire(now)
        return True

    def _count(self, immediates: list[int]) -> None:
        self.counted.update(immediates)

    def _send(self, content: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):  # the other side may be gone
            self._pipe.send_bytes(MESSAGE + content)

    def _read(self) -> None:
        while True:
            try:
                frame = self._pipe.recv_bytes()
            except (EOFError, OSError, TypeError):
                return
            kind, content = frame[:1], frame[1:]
            if kind == MESSAGE:
                self.loop.call(lambda content=content: self.exchange.on_message(content))
            else:
                self.loop.call(lambda content=content: self.exchange.drop_key(content))


class Owner:
    """The other side, in a process of its own, driven through a pipe."""

    def __init__(
        self, devices: tuple[str, ...], *, name: str = "owner", peer: str = "user"
    ) -> None:
        self.commands, theirs = CONTEXT.Pipe()
        self.pipe, pipe = CONTEXT.Pipe()
        # Forked: nothing of verbs is open in this process yet, and torch is imported only once.
        ours = self.commands, self.pipe
        self.process = CONTEXT.Process(target=_own, args=(ours, theirs, pipe, devices, name, peer))
        self.process.start()
        theirs.close()
        pipe.close()

    def ask(self, verb: str, *arguments: Any) -> Any:
        self.commands.send((verb, *arguments))
        if not self.commands.poll(SOON_S):
            raise TimeoutError(f"no answer to {verb}")
        result = self.commands.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        if self.process.is_alive():
            self.commands.send(("close",))
        self.process.join(SOON_S)
        assert not self.process.is_alive()
        self.commands.close()


def _own(
    inherited: tuple[Connection, ...],
    commands: Connection,
    pipe: Connection,
    devices: tuple[str, ...],
    name: str,
    peer: str,
) -> None:
    for connection in inherited:
        connection.close()
    node = VerbsNode(name, peer, devices, pipe)
    regions: list[Region] = []
    verbs: dict[str, Any] = {
        "fill": lambda i, seed: np.copyto(
            regions[i].array, random_bytes(regions[i].nbytes, seed).numpy()
        ),
        "bytes": lambda i: regions[i].tensor.numpy().tobytes(),
        "offer": lambda i, rights, offset=0, nbytes=None, to=None: node.offer(
            regions[i], Access(rights), offset, nbytes, to
        ),
        "withdraw": node.withdraw,
        "count": node.await_count,
        "counted": lambda: dict(node.counted),
        "place_in_other_domain": lambda key: PeerDomain(node.backend._devices[0]).remote(
            key.token, node.offers._offers[key.token]
        ),
        "registered": lambda: sum(d.num_registered for d in node.exchange._domains.values()),
    }
    while True:
        verb, *arguments = commands.recv()
        try:
            if verb == "close":
                node.close()
                return
            if verb == "make":
                regions.append(Region(torch.zeros(arguments[0], dtype=torch.uint8)))
                commands.send(len(regions) - 1)
            else:
                commands.send(verbs[verb](*arguments))
        except Exception as error:  # noqa: BLE001 (the test gets it)
            commands.send(error)


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))
