"""Carries out the steps of an operation in the calling thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from kvstore.client.steps import Ask, Effect, Move, Pause, Reach, Steps
from kvstore.errors import KVStoreError, MasterRefused
from kvstore.wire import messages as m
from transfer import TransferError

if TYPE_CHECKING:
    from kvstore.client.master_access import MasterAccess
    from kvstore.client.master_map import MasterMap
    from kvstore.client.segment_keys import SegmentKeys

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", bound=m.Reply)


class Driver:
    """Runs operations, each in the thread of its caller. Thread-safe.

    Args:
        link: The way to the master.
        segments: Keys to the nodes' segments.
    """

    def __init__(self, link: MasterMap, segments: SegmentKeys) -> None:
        self.link = link
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

    def ask(
        self,
        access: MasterAccess,
        request: m.Request,
        expected: type[ReplyT],
        *,
        timeout_s: float | None = None,
    ) -> ReplyT:
        """Ask the master, as `access.ask` does, without its steps while nothing is unusual."""
        try:
            return self.link.ask(request, expected, timeout_s=timeout_s)
        except MasterRefused as error:
            return self.run(access.ask_again(error, request, expected, timeout_s=timeout_s))

    def perform(self, effect: Effect) -> object:
        """Do what one step waits for, and return its result."""
        if isinstance(effect, Ask):
            return self.link.ask(effect.request, effect.expected, timeout_s=effect.timeout_s)
        if isinstance(effect, Reach):
            return self._segments.get(effect.where, deadline_s=effect.deadline_s)
        if isinstance(effect, Move):
            effect.transfer.wait()
        elif isinstance(effect, Pause):
            time.sleep(effect.seconds)
        return None
