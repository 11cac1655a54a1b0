"""Waiting for immediates: the part of an engine that is told of what has arrived."""

from __future__ import annotations

from collections.abc import Iterable

from transfer.immediates import ImmediateBoard, Wanted
from transfer.operations import deadline_after


class Arrivals:
    """The waits of a `TransferEngine`. Thread-safe."""

    _board: ImmediateBoard

    def expect(self, wanted: Wanted, *, timeout_s: float) -> None:
        """Wait until every (peer, immediate) has been counted so often, then take that off.

        All or nothing: what raises consumes nothing.

        Raises:
            PeerLost: a peer that still owes something is gone.
            ImmediateTimeout: not in time.
            Interrupted: `interrupt` holds.
        """
        self._board.expect(wanted, deadline_after(timeout_s, 0.0))

    def arrived(self, wanted: Wanted) -> bool:
        """Whether `expect` would return at once. Nothing is consumed. Raises `Interrupted`."""
        return self._board.arrived(wanted)

    def wait_any(self, keys: Iterable[tuple[str, int]], *, timeout_s: float) -> bool:
        """Wait until one of the immediates has been counted; nothing is consumed.

        Returns:
            False at the timeout, or after `wake`.

        Raises:
            Interrupted: `interrupt` holds.
        """
        return self._board.wait_any(keys, deadline_after(timeout_s, 0.0))

    def wake(self) -> None:
        """Make a `wait_any` in progress, or the next one, return."""
        self._board.wake()

    def interrupt(self, reason: str) -> None:
        """Make every `expect` and `wait_any`, present and future, raise until `resume`."""
        self._board.interrupt(reason)

    def resume(self) -> None:
        """End `interrupt`."""
        self._board.resume()
