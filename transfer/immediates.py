"""Immediates: small numbers that are counted, never ordered.

A write may carry an immediate. It is counted here once all bytes of the write are in place, per
(peer, immediate). Whoever expects a count waits for it, and takes it off when it is complete.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from transfer.arguments import check_immediate_key, check_type, check_wanted
from transfer.errors import (
    EngineClosed,
    ImmediateTimeout,
    Interrupted,
    PeerLost,
    ProtocolViolation,
)
from transfer.signals import SignalChannel, SignalPoll

IMMEDIATE_MAX: Final = 2**32 - 1
# Distinct immediates of one peer that nobody has consumed yet.
PENDING_MAX: Final = 1 << 16
CLOSE_S: Final = 5.0

Wanted = Mapping[tuple[str, int], int]


class ImmediateCounters:
    """Counts per peer and immediate. Not thread-safe, knows no clock."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, int]] = {}

    def add(self, peer: str, immediates: Iterable[int]) -> None:
        """Count arrivals.

        Raises:
            ProtocolViolation: the peer sends ever new immediates that nobody expects.
        """
        counts = self._counts.setdefault(peer, {})
        for immediate in immediates:
            counts[immediate] = counts.get(immediate, 0) + 1
        if len(counts) > PENDING_MAX:
            raise ProtocolViolation(f"{len(counts)} distinct immediates that nobody consumed")

    def count(self, peer: str, immediate: int) -> int:
        """Return how many have arrived and were not consumed."""
        return self._counts.get(peer, {}).get(immediate, 0)

    def missing(self, wanted: Wanted) -> list[tuple[str, int]]:
        """Return the pairs whose count is not reached."""
        return [key for key, count in wanted.items() if self.count(*key) < count]

    def consume(self, wanted: Wanted) -> None:
        """Take the counts off; what arrived beyond them stays."""
        for (peer, immediate), count in wanted.items():
            counts = self._counts[peer] if count else {}
            left = self.count(peer, immediate) - count
            assert left >= 0, "consumed before it was complete"
            if left:
                counts[immediate] = left
            else:
                counts.pop(immediate, None)

    def drop(self, peer: str) -> None:
        """Forget all counts of a peer."""
        self._counts.pop(peer, None)


class ImmediateBoard:
    """Where threads wait for immediates. Thread-safe.

    The waiting thread itself polls the peers' signal sockets, so an immediate costs one wake-up.
    If several threads wait, one of them polls and the others wait for it. Who polls, changes
    and waits does so under one lock, so no wake-up is lost and nobody looks again by the clock.

    Args:
        lost: says why a peer is gone; None if it is well. Raises `PeerUnknown`.
        on_signal_lost: called without any lock when a signal socket ends.
    """

    def __init__(
        self,
        *,
        lost: Callable[[str], str | None],
        on_signal_lost: Callable[[SignalChannel, str], None],
    ) -> None:
        self._lost = lost
        self._on_signal_lost = on_signal_lost
        self._counters = ImmediateCounters()
        self._changed = threading.Condition()
        self._polling = False
        self._num_waiting = 0
        self._interrupted: str | None = None
        self._woken = False
        self._closed = True
        self.poll = SignalPoll()
        self.num_received = 0

    def open(self) -> None:
        """Start to accept waits."""
        self.poll.open()
        self._closed = False

    def close(self) -> None:
        """Make every wait, present and future, raise `EngineClosed`; free the descriptors."""
        with self._changed:
            self._closed = True
        self.notify()
        # A waiter that polls leaves at once; only then may its descriptors go.
        with self._changed:
            left = self._changed.wait_for(lambda: not self._polling, CLOSE_S)
        assert left, "a thread polls although it was woken"
        self.poll.close()

    def abandon(self) -> None:
        """Close the descriptors only: the way out after a fork."""
        self.poll.abandon()

    def count(self, peer: str, immediates: Iterable[int]) -> None:
        """Count arrivals that did not come over a signal socket."""
        with self._changed:
            before = self._num_waiting
            self._counters.add(peer, immediates)
            self.num_received += 1
        if before:
            self.notify()

    def drop(self, peer: str) -> None:
        """Forget the counts of a peer."""
        with self._changed:
            self._counters.drop(peer)

    def notify(self) -> None:
        """Make every waiting thread look again."""
        self.poll.wake()
        with self._changed:
            self._changed.notify_all()

    def wake(self) -> None:
        """Make a `wait_any` in progress, or the next one, return."""
        with self._changed:
            self._woken = True
        self.notify()

    def interrupt(self, reason: str) -> None:
        """Make every wait raise until `resume`."""
        check_type("reason", reason, str)
        with self._changed:
            self._interrupted = reason
        self.notify()

    def resume(self) -> None:
        """End `interrupt`."""
        with self._changed:
            self._interrupted = None

    def expect(self, wanted: Wanted, deadline: float) -> None:
        """Wait for all, then take them off."""
        check_wanted(wanted)

        def complete() -> bool:
            missing = self._counters.missing(wanted)
            if not missing:
                self._counters.consume(wanted)
                return True
            for peer, _ in missing:
                if (evidence := self._lost(peer)) is not None:
                    raise PeerLost(peer, evidence)
            return False

        if not self._wait(complete, deadline):
            with self._changed:
                raise ImmediateTimeout(tuple(self._counters.missing(wanted)))

    def arrived(self, wanted: Wanted) -> bool:
        """Whether all have arrived; nothing is taken off. Raises `Interrupted` as a wait does."""
        check_wanted(wanted)
        return self._wait(lambda: not self._counters.missing(wanted), time.monotonic())

    def wait_any(self, keys: Iterable[tuple[str, int]], deadline: float) -> bool:
        """Wait until one has arrived (True), or the deadline or `wake` (False)."""
        keys = tuple(keys)
        for key in keys:
            check_immediate_key(key)
        outcome = False

        def arrived_or_woken() -> bool:
            nonlocal outcome
            outcome = any(self._counters.count(*key) for key in keys)
            woken, self._woken = self._woken, False
            return outcome or woken

        self._wait(arrived_or_woken, deadline)
        return outcome

    def drain(self) -> None:
        """Read all signals that are there, unless a waiting thread is at it anyway."""
        with self._changed:
            if self._num_waiting or self._polling or self._closed:
                return
            self._polling = True
        self._poll_once(0.0)

    def drain_channel(self, channel: SignalChannel) -> None:
        """Read what a lost peer has left behind: its completed writes still count."""
        while self._receive(channel):
            pass

    def _wait(self, complete: Callable[[], bool], deadline: float) -> bool:
        with self._changed:
            self._num_waiting += 1
            try:
                while True:
                    self._check_allowed()
                    if complete():
                        return True
                    remaining = deadline - time.monotonic()
                    self._poll_or_follow(max(remaining, 0.0))
                    if remaining <= 0:
                        self._check_allowed()
                        return complete()
            finally:
                self._num_waiting -= 1

    def _check_allowed(self) -> None:
        if self._closed:
            raise EngineClosed("the transfer engine is not open")
        if self._interrupted is not None:
            raise Interrupted(self._interrupted)

    def _poll_or_follow(self, timeout_s: float) -> None:
        """Wait once for something to change. Holds the lock on entry and on return."""
        if self._polling:
            self._changed.wait(timeout_s)
            return
        self._polling = True
        self._changed.release()
        try:
            self._poll_once(timeout_s)
        finally:
            self._changed.acquire()

    def _poll_once(self, timeout_s: float) -> None:
        try:
            for channel in self.poll.wait(timeout_s):
                self._receive(channel)
        finally:
            with self._changed:
                self._polling = False
                # Those who follow look at the counts, and one of them polls next.
                self._changed.notify_all()

    def _receive(self, channel: SignalChannel) -> bool:
        try:
            immediates = channel.receive()
            if immediates:
                with self._changed:
                    self._counters.add(channel.peer, immediates)
                    self.num_received += len(immediates)
        except (OSError, ProtocolViolation) as error:
            self.poll.remove(channel)
            self._on_signal_lost(channel, str(error))
            return False
        return bool(immediates)
