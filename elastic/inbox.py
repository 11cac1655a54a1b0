"""Where the engine's thread and the watch leave events for the rank loop. Thread-safe.

An event that makes a view change certain also interrupts the engine, so that a rank loop that
waits inside a pass comes to look. The interrupt is sticky; `calm` takes it back.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping

from elastic import messages
from elastic.errors import RecordInvalid
from elastic.evidence import Evidence, EvidenceKind
from elastic.protocol import Event, Received, RecordRead, Suspected, Tick
from elastic.view import View
from transfer import TransferEngine, TransferError

logger = logging.getLogger(__name__)


class Inbox:
    """Events in the order in which they came. Construct it before the engine is opened.

    Unbounded in itself: peers are authenticated members, and each sends a handful of messages
    per epoch and then waits for others.

    Args:
        engine: Whose notifies and losses are taken in.
        clock: Monotonic seconds.
    """

    def __init__(self, engine: TransferEngine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._epoch = 0
        self._members: frozenset[str] = frozenset()
        self._interrupted_at: float | None = None
        engine.on_notify(self._on_notify)
        engine.on_peer_lost(self._on_peer_lost)

    @property
    def interrupted_at(self) -> float | None:
        """Since when the engine is interrupted; None: it is not."""
        return self._interrupted_at

    @property
    def members(self) -> frozenset[str]:
        """The other members of the view that this process follows."""
        return self._members

    @property
    def empty(self) -> bool:
        """Whether nothing waits at this moment."""
        return self._events.empty()

    def take(self, timeout_s: float = 0.0) -> Event | None:
        """Return the oldest event, waiting up to `timeout_s` for one."""
        try:
            return (
                self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
            )
        except queue.Empty:
            return None

    def put(self, event: Event, *, urgent: bool = False) -> None:
        """Add an event; an urgent one interrupts the engine, if this process is in a view."""
        with self._lock:
            self._events.put(event)
            if urgent and self._epoch > 0 and self._interrupted_at is None:
                self._interrupted_at = self._clock()
                self._engine.interrupt("the membership changes")

    def nudge(self) -> None:
        """Wake who waits in `take`. Takes no lock: a signal handler may call it at any point."""
        self._events.put(Tick())

    def put_record(self, view: View) -> None:
        """Add a view read from the record, if it is newer than the adopted one."""
        if view.epoch > self._epoch:
            self.put(RecordRead(view), urgent=True)

    def put_ended(self, ended: Mapping[str, str]) -> None:
        """Add the proof that these incarnations have ended, as their agents reported it."""
        for name, how in ended.items():
            evidence = Evidence(kind=EvidenceKind.PROCESS_EXIT, detail=f"its agent says: {how}")
            self.put(Suspected((name,), evidence), urgent=name in self._members)

    def follow(self, view: View, own: str) -> None:
        """Judge what comes in by this view from now on."""
        with self._lock:
            self._epoch = view.epoch
            self._members = view.incarnations - {own}

    def calm(self) -> bool:
        """End an interrupt; False, and nothing done, if an event came in meanwhile."""
        with self._lock:
            if not self._events.empty():
                return False
            if self._interrupted_at is not None:
                self._interrupted_at = None
                self._engine.resume()
            return True

    def _on_notify(self, peer: str, payload: bytes) -> None:
        try:
            message = messages.decode(payload)
        except RecordInvalid as error:
            logger.warning("from peer %s: %s", peer, error)
            return
        if isinstance(message, messages.Probe):
            self._answer(peer, message)
        elif message is not None:
            same_abort = isinstance(message, messages.Abort) and message.epoch == self._epoch
            self.put(Received(peer, message), urgent=same_abort or message.epoch > self._epoch)

    def _answer(self, peer: str, probe: messages.Probe) -> None:
        try:
            self._engine.notify(
                self._engine.peer(peer), messages.encode(messages.Alive(probe.epoch))
            )
        except TransferError as error:
            logger.debug("probe of peer %s can't be answered: %s", peer, error)

    def _on_peer_lost(self, peer: str, evidence: str) -> None:
        event = Suspected((peer,), Evidence(kind=EvidenceKind.CONNECTION_LOST, detail=evidence))
        self.put(event, urgent=peer in self._members)
