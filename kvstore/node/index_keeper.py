"""Brings the logs of a node's segments up to date, on a thread that may wait for a disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from kvstore.node.segment import Segment

logger = logging.getLogger(__name__)

GATHER_S: Final = 0.01  # so that a burst of notes is one write
RETRY_S: Final = 5.0


class IndexKeeper:
    """One thread. Thread-safe.

    Args:
        segments: Those whose index has a log.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._awake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-index", daemon=True)

    def open(self) -> None:
        """Start the thread, if there is anything to keep."""
        if self._segments:
            self._thread.start()

    def close(self) -> None:
        """Stop; the segments write what is left when they are closed. Idempotent."""
        self._closing.set()
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        """Something was recorded. Never waits."""
        self._awake.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            suspended = any(segment.figures().log_suspended for segment in self._segments)
            woken = self._awake.wait(RETRY_S if suspended else None)
            self._awake.clear()
            for segment in self._segments:
                segment.index.flush(retry=not woken)
            self._closing.wait(GATHER_S)
