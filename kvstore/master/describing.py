"""What blocks are, as their writers say: for subscribers of events, and for nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.events.chains import TOKEN_TYPE, Link
from kvstore.events.event_log import EventLog
from kvstore.keys import KEY_BYTES
from kvstore.master.transition import NEVER, Transition, equally_long, malformed
from kvstore.wire import messages as m


class Describing:
    """See `MasterPart`.

    Args:
        events: Where it is noted; None if there are no subscribers.
    """

    def __init__(self, events: EventLog | None) -> None:
        self._events = events

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {m.Describe: self._describe}

    def advance(self, now: float) -> float:
        """Nothing is ever due."""
        del now
        return NEVER

    def _describe(self, request: m.Describe, now: float) -> m.Reply:
        del now
        if not equally_long(request.keys, request.parents, request.tokens):
            return malformed("columns of different lengths")
        if not {len(parent) for parent in request.parents} <= {0, KEY_BYTES}:
            return malformed(f"a parent has {KEY_BYTES} bytes, or none")
        if any(len(tokens) % TOKEN_TYPE.itemsize for tokens in request.tokens):
            return malformed(f"a token has {TOKEN_TYPE.itemsize} bytes")
        if self._events is None:
            return m.Done(0)
        links = zip(request.parents, request.tokens, strict=True)
        self._events.describe(
            request.keys, [Link(parent or None, tokens) for parent, tokens in links]
        )
        return m.Done(len(request.keys))
