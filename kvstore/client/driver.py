"""Carries out the steps of an operation in the calling thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from kvstore.client.steps import Ask, Effect, Move, Pause, Reach, Steps
from kvstore.errors import KVStoreError
from transfer import TransferError

if TYPE_CHECKING:
    from kvstore.client.master_map import MasterMap
    from kvstore.client.segment_keys import SegmentKeys

T = TypeVar("T")


class Driver:
    """Runs operations, each in the thread of its caller. Thread-safe.

    Args:
        link: The way to the master.
        segments: Keys to the nodes' segments.
    """

    def __init__(self, link: MasterMap, segments: SegmentKeys) -> None:
        self._link = link
        self._segments = segments

    def run(self, steps: Steps[T]) -> T:
        """Run an operation to its end; return its result or raise its error."""
        result: object = None
        error: Exception | None = None
        while True:
            try:
                effect = steps.send(result) if error is None else steps.throw(error)
            except StopIteration as end:
                ended: T = end.value
                return ended
            try:
                result, error = self.perform(effect), None
            except (KVStoreError, TransferError) as failure:
                result, error = None, failure

    def perform(self, effect: Effect) -> object:
        """Do what one step waits for, and return its result."""
        if isinstance(effect, Ask):
            return self._link.ask(effect.request, effect.expected, timeout_s=effect.timeout_s)
        if isinstance(effect, Reach):
            return self._segments.get(effect.where, deadline_s=effect.deadline_s)
        if isinstance(effect, Move):
            effect.transfer.wait()
        elif isinstance(effect, Pause):
            time.sleep(effect.seconds)
        return None
