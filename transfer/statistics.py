"""What an engine has done, counted."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final

from transfer.priority import Priority

# Bytes written and read, immediates, then operations and bytes of each class.
Counts = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]

BACKENDS: Final = ("shared_memory", "process_memory", "verbs", "tcp", "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatistics:
    """Totals of one backend.

    Attributes:
        bytes_written: sent by our writes.
        bytes_read: fetched by our reads.
        operations: our writes and reads, failed ones included.
        failures: those that ended with an error.
        immediates: sent by our writes.
        resends: slices sent again because a connection broke.
        refused: accesses of peers to our memory that were refused, and ours that were.
        bytes_served: written and read by peers through our thread (tcp only).
    """

    bytes_written: int = 0
    bytes_read: int = 0
    operations: int = 0
    failures: int = 0
    immediates: int = 0
    resends: int = 0
    refused: int = 0
    bytes_served: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RailStatistics:
    """One rail to one connected peer.

    Attributes:
        peer: who is at its other end.
        rail: backend, local and remote address or device.
        state: "healthy", "cooling" or "probing".
        open: whether a link stands.
        bytes: of slices that came to their end over it.
        slices: how many.
        bandwidth: estimate, bytes/s; 0 before anything was measured.
        failures: how often it broke, stalled or could not be opened.
        retries: slices that it lost and that were sent again.
        bytes_in_flight: posted, and not ended.
        evidence: why it failed last, "" if it never did.
        failed_at: when, by `time.monotonic`.
    """

    peer: str
    rail: str
    state: str
    open: bool
    bytes: int
    slices: int
    bandwidth: float
    failures: int
    retries: int
    bytes_in_flight: int
    evidence: str = ""
    failed_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityStatistics:
    """Totals of one class of traffic, over all backends.

    Attributes:
        operations: our writes and reads.
        bytes: that they were asked to move.
        queued: operations that went over rails.
        queue_s: how long all of them together waited before their first slice left.
    """

    operations: int
    bytes: int
    queued: int
    queue_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStatistics:
    """A snapshot.

    Attributes:
        backends: by name, "shared_memory", "process_memory", "verbs", "tcp" and "local".
        priorities: by class of traffic.
        rails: of the peers that are connected, those that were open once.
        immediates_received: counted here, from all peers.
        refused_handshakes: callers that did not prove themselves, or were not wanted.
        malformed: connections closed because of bytes that make no sense.
        notifies_received: payloads given to the handlers.
        control_resumes: control connections that went on over another socket.
        peers: connected now.
        offers: windows of our memory that are offered now.
    """

    backends: Mapping[str, BackendStatistics]
    priorities: Mapping[Priority, PriorityStatistics]
    rails: tuple[RailStatistics, ...]
    immediates_received: int
    refused_handshakes: int
    malformed: int
    notifies_received: int
    control_resumes: int
    peers: int
    offers: int


class Tally:
    """The counters behind the snapshot. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        names = [field.name for field in fields(BackendStatistics)]
        self._backends = {backend: dict.fromkeys(names, 0) for backend in BACKENDS}
        self._operations = [0] * len(Priority)
        self._bytes = [0] * len(Priority)
        self._queued = [0] * len(Priority)
        self._queue_s = [0.0] * len(Priority)
        self._totals = dict.fromkeys(
            ("refused_handshakes", "malformed", "notifies_received", "control_resumes"), 0
        )

    def add(self, backend: str, **amounts: int) -> None:
        """Add to counters of a backend."""
        with self._lock:
            counters = self._backends[backend]
            for name, amount in amounts.items():
                counters[name] += amount

    def wrote(self, backend: str, nbytes: int, signal: bool, priority: Priority) -> None:
        """Count a write of ours."""
        with self._lock:
            counters = self._backends[backend]
            counters["operations"] += 1
            counters["bytes_written"] += nbytes
            if signal:
                counters["immediates"] += 1
            self._operations[priority] += 1
            self._bytes[priority] += nbytes

    def read(self, backend: str, nbytes: int, priority: Priority) -> None:
        """Count a read of ours."""
        with self._lock:
            counters = self._backends[backend]
            counters["operations"] += 1
            counters["bytes_read"] += nbytes
            self._operations[priority] += 1
            self._bytes[priority] += nbytes

    def took_short_way(self, counts: Counts) -> None:
        """Count transfers over tcp that left at once: `wrote` and `read`, and `waited`."""
        with self._lock:
            self._add_counts("tcp", counts)
            for idx, operations in enumerate(counts[3]):
                self._queued[idx] += operations

    def copied_at_once(self, counts: Counts) -> None:
        """Count copies between mapped memories: `wrote` and `read`."""
        with self._lock:
            self._add_counts("shared_memory", counts)

    def _add_counts(self, backend: str, counts: Counts) -> None:
        written, read, immediates, operations, nbytes = counts
        counters = self._backends[backend]
        counters["operations"] += sum(operations)
        counters["bytes_written"] += written
        counters["bytes_read"] += read
        counters["immediates"] += immediates
        for idx in range(len(Priority)):
            self._operations[idx] += operations[idx]
            self._bytes[idx] += nbytes[idx]

    def waited(self, priority: Priority, seconds: float) -> None:
        """Count how long an operation waited before its first slice left."""
        with self._lock:
            self._queued[priority] += 1
            self._queue_s[priority] += seconds

    def count(self, name: str) -> None:
        """Add one to a counter of the engine."""
        with self._lock:
            self._totals[name] += 1

    def snapshot(
        self,
        *,
        rails: Iterable[RailStatistics],
        immediates_received: int,
        peers: int,
        offers: int,
    ) -> TransferStatistics:
        """Return all counters as they are now."""
        with self._lock:
            return TransferStatistics(
                backends={k: BackendStatistics(**v) for k, v in self._backends.items()},
                priorities={
                    p: PriorityStatistics(
                        operations=self._operations[p],
                        bytes=self._bytes[p],
                        queued=self._queued[p],
                        queue_s=self._queue_s[p],
                    )
                    for p in Priority
                },
                rails=tuple(rails),
                immediates_received=immediates_received,
                peers=peers,
                offers=offers,
                **self._totals,
            )
