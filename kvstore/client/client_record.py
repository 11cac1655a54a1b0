"""What a client remembers between its calls: whom to leave alone, what was given up, counts."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

AVOID_S: Final = 5.0  # how long a node that could not be reached is left alone
ABANDONED_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatistics:
    """Counts since the client was made. `hot_blocks` of the read ones needed no master."""

    hit_blocks: int
    missed_blocks: int
    read_blocks: int
    hot_blocks: int
    corrupt_blocks: int
    unreachable_blocks: int
    stored_blocks: int
    skipped_blocks: int
    failed_blocks: int
    lost_leases: int


class ClientRecord:
    """Thread-safe.

    Args:
        name: The client's incarnation, its engine's name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._batches = itertools.count(1)
        self._avoided: dict[str, float] = {}  # node -> until when
        self._abandoned: list[int] = []
        self._counts = dict.fromkeys(ClientStatistics.__dataclass_fields__, 0)

    def next_batch(self) -> int:
        """Number a put; no number is used twice."""
        return next(self._batches)

    @property
    def avoids(self) -> bool:
        """Whether `avoided` may name anybody."""
        return bool(self._avoided)

    def avoided(self) -> list[str]:
        """Nodes that could not be reached a moment ago."""
        if not self._avoided:
            return []
        now = time.monotonic()
        with self._lock:
            self._avoided = {node: t for node, t in self._avoided.items() if t > now}
            return list(self._avoided)

    def shun(self, nodes: Sequence[str]) -> None:
        """Leave nodes alone for a while."""
        until_s = time.monotonic() + AVOID_S
        with self._lock:
            self._avoided.update(dict.fromkeys(nodes, until_s))

    def abandon(self, batch: int) -> None:
        """Nothing of this put was or will be written any more; the next put says so."""
        with self._lock:
            self._abandoned = [*self._abandoned, batch][-ABANDONED_MAX:]

    def abandoned(self) -> list[int]:
        """Puts whose ends the master has not been told."""
        with self._lock:
            return list(self._abandoned)

    def told_abandoned(self, batches: Sequence[int]) -> None:
        """The master knows of these."""
        if batches:
            with self._lock:
                self._abandoned = [i for i in self._abandoned if i not in batches]

    def count(self, **more: int) -> None:
        """Add to the counts of these names."""
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def count_stored(self) -> None:
        """Count one block that was stored."""
        with self._lock:
            self._counts["stored_blocks"] += 1

    def statistics(self) -> ClientStatistics:
        """Return the counts."""
        with self._lock:
            return ClientStatistics(**self._counts)
