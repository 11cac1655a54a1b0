"""An engine for coordinators in threads of one process: notify, loss, fencing and interrupts.

It has the part of the transfer engine's interface that membership uses, no memory and no sockets.
Callbacks come on one thread per engine, as with the real one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from transfer import HandshakeRefused, PeerLost, PeerUnknown, PeerUnreachable


@dataclass
class LoopbackPeer:
    name: str
    alive: bool = True


class Hub:
    """All engines of a test, by address."""

    def __init__(self) -> None:
        self.engines: dict[str, LoopbackEngine] = {}
        self.lock = threading.RLock()


class LoopbackEngine:
    def __init__(self, hub: Hub, name: str) -> None:
        self.hub, self.name, self.address = hub, name, f"loopback:{name}"
        self.alive = True
        self.deaf = threading.Event()  # set: the engine's thread stands still, as if stopped
        self.interrupted = threading.Event()
        self.sent = 0
        self._peers: dict[str, LoopbackPeer] = {}
        self._fenced: set[str] = set()
        self._notified: list[Callable[[str, bytes], object]] = []
        self._lost: list[Callable[[str, str], object]] = []
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"loopback-{name}", daemon=True)
        hub.engines[self.address] = self
        self._thread.start()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if not self.deaf.is_set():
                work()

    def on_notify(self, handler: Callable[[str, bytes], object]) -> None:
        self._notified.append(handler)

    def on_peer_lost(self, handler: Callable[[str, str], object]) -> None:
        self._lost.append(handler)

    def peer(self, name: str) -> LoopbackPeer:
        if name not in self._peers:
            raise PeerUnknown(name)
        return self._peers[name]

    def peers(self) -> list[LoopbackPeer]:
        return list(self._peers.values())

    def connect(self, address: str, *, timeout_s: float | None = None) -> LoopbackPeer:
        with self.hub.lock:
            other = self.hub.engines.get(address)
            if other is None or not other.alive or not self.alive:
                raise PeerUnreachable(address, "connection refused")
            if other.name in self._fenced or self.name in other._fenced:
                raise HandshakeRefused(address, "fenced")
            for mine, theirs in ((self, other), (other, self)):
                known = mine._peers.get(theirs.name)
                if known is None or not known.alive:
                    mine._peers[theirs.name] = LoopbackPeer(theirs.name)
            return self._peers[other.name]

    def notify(self, peer: LoopbackPeer, payload: bytes) -> None:
        if not peer.alive:
            raise PeerLost(peer.name, "its engine is closed")
        self.sent += 1
        other = self.hub.engines[f"loopback:{peer.name}"]
        other._queue.put(lambda: [call(self.name, payload) for call in other._notified])

    def disconnect(self, name: str, *, reason: str) -> None:
        with self.hub.lock:
            self._fenced.add(name)
            self._break(name)

    def _break(self, name: str) -> None:
        other = self.hub.engines.get(f"loopback:{name}")
        for mine, lost in ((self, name), (other, self.name)):
            if mine is None:
                continue
            peer = mine._peers.get(lost)
            if peer is not None and peer.alive:
                peer.alive = False
                mine._queue.put(lambda m=mine, n=lost: [call(n, "end of file") for call in m._lost])

    def kill(self) -> None:
        """End of this process, as all others see it."""
        with self.hub.lock:
            self.alive = False
            self._notified.clear()
            for name in list(self._peers):
                self._break(name)

    def interrupt(self, reason: str) -> None:
        self.interrupted.set()

    def resume(self) -> None:
        self.interrupted.clear()

    def close(self) -> None:
        self.kill()
        self._queue.put(None)
        self._thread.join(timeout=5)
