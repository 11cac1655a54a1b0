"""A wire that listens: a tcp proxy that keeps what it carries, and can be cut."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType

import msgspec

from transfer import TransferEngine

PORTION_BYTES = 64 << 10


class Recorder:
    """Carries bytes to `target` ("host:port") and back.

    Attributes:
        address: where it listens.
        carried: everything so far, of all connections and both ways.
        num_cut: connections that it has reset.
    """

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.carried = bytearray()
        self.num_cut = 0
        self._cut_at: int | None = None
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, name="recorder")]

    def stand_before(self, engine: TransferEngine) -> None:
        """Have everybody who hears of the engine call here; before anybody does."""
        facts = engine._rendezvous.facts
        engine._rendezvous.facts = msgspec.structs.replace(facts, address=self.address)

    def cut_after(self, nbytes: int) -> None:
        """Reset every connection once so many more bytes have passed."""
        with self._lock:
            self._cut_at = len(self.carried) + nbytes

    def __enter__(self) -> Recorder:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            self._reset()
        for thread in self._threads:
            thread.join(10.0)

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            try:
                called = socket.create_connection(self._target)
            except OSError:
                caller.close()
                continue
            with self._lock:
                self._pairs.append((caller, called))
            for source, sink in ((caller, called), (called, caller)):
                thread = threading.Thread(target=self._pump, args=(source, sink), name="recorder")
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while portion := source.recv(PORTION_BYTES):
                with self._lock:
                    self.carried += portion
                    if self._cut_at is not None and len(self.carried) >= self._cut_at:
                        self._cut_at = None
                        self.num_cut += self._reset()
                        return
                sink.sendall(portion)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _reset(self) -> int:
        pairs, self._pairs = self._pairs, []
        for sock in (sock for pair in pairs for sock in pair):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
            sock.close()
        return len(pairs)
