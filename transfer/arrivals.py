"""Waiting for immediates: the part of an engine that is told of what has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from transfer.arguments import check_handler
from transfer.backends.server import LeftNote
from transfer.connections.links import Links
from transfer.immediates import ImmediateBoard, Wanted
from transfer.operations import deadline_after


class Arrivals:
    """The waits of a `TransferEngine`. Thread-safe."""

    _board: ImmediateBoard
    _links: Links

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

    def take_notes(self) -> list[LeftNote]:
        """Return the notes that peers have left with writes since the last call.

        Returns:
            Of each its peer, nanoseconds of the monotonic clock when its bytes were in place, and
            the note; in the order of these times. Those of peers that are gone are among them.
        """
        return self._links.service.take_notes()

    def on_notes(self, handler: Callable[[], None]) -> None:
        """Call `handler()`, which should `take_notes`, when many have been left (1024, or 1 MiB).

        On a thread of the engine; it must not wait. Without a handler they are dropped then.
        Nobody is told of fewer: whoever needs to know takes them. A second handler replaces the
        first.
        """
        self._links.service.on_notes(check_handler(handler))

    def wake(self) -> None:
        """Make a `wait_any` in progress, or the next one, return."""
        self._board.wake()

    def interrupt(self, reason: str) -> None:
        """Make every `expect` and `wait_any`, present and future, raise until `resume`."""
        self._board.interrupt(reason)

    def resume(self) -> None:
        """End `interrupt`."""
        self._board.resume()
