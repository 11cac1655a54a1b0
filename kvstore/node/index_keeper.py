"""Brings the logs of a node's segments up to date, on a thread that may wait for a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from kvstore.node.segment import Segment

logger = logging.getLogger(__name__)

GATHER_S: Final = 0.01  # so that a burst of notes is one write
RETRY_S: Final = 5.0
ATTEND_S: Final = 1.0  # after a write: in this time its writer says what it was


class IndexKeeper:
    """One thread. Thread-safe.

    Args:
        segments: All; those whose index has a log are kept.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._kept: Sequence[Segment] = ()
        self._awake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-index", daemon=True)
        self._attends_until_s = 0.0

    def open(self) -> None:
        """Start the thread, if there is anything to keep. The segments are open."""
        self._kept = [segment for segment in self._segments if segment.is_logged]
        if self._kept:
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

    def attend(self) -> None:
        """Something is being written, and what is said of it may be left where it wakes nobody.

        So the thread looks by itself for a while, and every `RETRY_S` later on. Never waits.
        """
        now = time.monotonic()
        attends, self._attends_until_s = now < self._attends_until_s, now + ATTEND_S
        if not attends:
            self._awake.set()

    def _run(self) -> None:
        retry_s = time.monotonic() + RETRY_S
        while not self._closing.is_set():
            if time.monotonic() >= self._attends_until_s:
                self._awake.wait(RETRY_S)
            self._awake.clear()
            retry = time.monotonic() >= retry_s
            if retry:
                retry_s = time.monotonic() + RETRY_S
            for segment in self._kept:
                segment.index.flush(retry=retry)
            self._closing.wait(GATHER_S)
