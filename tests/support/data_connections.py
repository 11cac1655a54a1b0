"""Lanes and servers of both kinds, joined without an engine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from transfer import native
from transfer.backends.python_lane import PythonLane, python_progress
from transfer.backends.server import PythonServer
from transfer.wire import (
    PAYLOAD_BYTES_MAX,
    SLICE_PIECES,
    SLICES_MAX,
    Request,
    RequestKind,
    encode_pieces,
    parse_request,
)

KINDS = ["compiled", "python"] if native.COMPILED else ["python"]
TOKEN = b"0123456789abcdef"
SOON_S = 60.0


def make_server(kind: str) -> Any:
    make = PythonServer if kind == "python" else native.compiled.Server
    return make(PAYLOAD_BYTES_MAX, SLICE_PIECES, SLICES_MAX)


def make_lane(kind: str, sock: socket.socket) -> Any:
    return (PythonLane if kind == "python" else native.compiled.Lane)(sock.detach())


def progress(kind: str, lanes: Sequence[Any], timeout_s: float) -> list[tuple]:
    move = python_progress if kind == "python" else native.compiled.progress
    return move(lanes, timeout_s)


def post_one(
    lane: Any, item: object, head: bytes, writes: bool, address: int, offset: int, nbytes: int
) -> bool:
    """Post the request of a header, of one piece."""
    request = parse_request(head)
    assert (request.num_pieces, request.nbytes) == (1, nbytes)
    numbers = np.array([[0], [offset], [nbytes]], dtype=np.int64)
    return lane.post(item, head, writes, address, *numbers)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for sock in (ours, theirs):
        sock.settimeout(SOON_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def header(kind: RequestKind = RequestKind.WRITE, **fields: Any) -> bytes:
    """A request's header; by default an only slice of the first transfer."""
    default = {
        "transfer_id": 1, "oldest": 1, "slice_idx": 0, "num_slices": 1, "num_pieces": 0,
        "nbytes": 0, "immediate": None, "token": TOKEN,
    }  # fmt: skip
    return Request(kind=kind, **{**default, **fields}).encode()


def write_bytes(offset: int, payload: bytes, note: bytes = b"", **fields: Any) -> bytes:
    """A whole write of one piece, as it goes over the connection."""
    numbers = np.array([offset], dtype=np.int64), np.array([len(payload)], dtype=np.int64)
    head = header(num_pieces=1, nbytes=len(payload), note_bytes=len(note), **fields)
    return head + encode_pieces(*numbers) + payload + note


class Rig:
    """A server with one offered window, and its thread. `events` collects what it tells."""

    def __init__(self, kind: str, nbytes: int, rights: int = 3) -> None:
        self.kind = kind
        self.server = make_server(kind)
        self.memory = np.zeros(nbytes, dtype=np.uint8)
        self.peer = self.server.open_peer("peer")
        self.server.add_offer(TOKEN, "peer", self.memory.ctypes.data, nbytes, rights)
        self.events: list[tuple] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rig")
        self._thread.start()

    @property
    def ident(self) -> int:
        """Identity of the server's thread."""
        assert self._thread.ident is not None
        return self._thread.ident

    def connect(self, pair: Callable[[], tuple] = tcp_pair) -> socket.socket:
        """A raw socket to the server."""
        ours, theirs = pair()
        ours.settimeout(SOON_S)
        self.server.attach(self.peer, theirs.detach())
        return ours

    def close(self) -> None:
        self._stopping = True
        self.server.wake()
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        self.events += self.server.take_events()
        self.server.close()

    def told(self, kind: int) -> list[object]:
        return [detail for found, _, _, detail in list(self.events) if found == kind]

    def _run(self) -> None:
        while not self._stopping:
            self.server.run(SOON_S)
            self.events += self.server.take_events()


@contextmanager
def rig(kind: str, nbytes: int = 1 << 20, rights: int = 3) -> Iterator[Rig]:
    made = Rig(kind, nbytes, rights)
    try:
        yield made
    finally:
        made.close()
