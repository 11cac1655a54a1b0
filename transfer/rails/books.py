"""The books about one peer: which transfers are unfinished, and how busy each rail is.

    1 ......... oldest ................. following ......... oldest + ahead_max
     finished  |  unfinished or finished |  free            |  refused by the owner

The compiled ones also have the messages of the short way (`compiled/message.c`), which are posted
and settled without Python. These here have none: without the compiled part there is no short way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from transfer import native
from transfer.wire import TRANSFERS_AHEAD_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transfer.memory.region import Region
    from transfer.rails.express import Express

Tiers = tuple[tuple[int, ...], ...]


class LoadLike(Protocol):
    """How busy a rail is.

    Attributes:
        open: whether a link stands.
        healthy: whether it may be used freely.
        attends_soon: the engine's thread is about to see to what has no leader.
        out_bytes, urgent_bytes: under way, and the urgent of them; messages included.
        messages_done, bytes_done, progressed_at: of messages only.
        bandwidth: estimate, bytes/s.
        bulk_bytes_max, bulk_bytes_max_beside_urgent: how much bulk may be under way.
    """

    open: bool
    healthy: bool
    attends_soon: bool
    out_bytes: int
    urgent_bytes: int
    messages_done: int
    bytes_done: int
    progressed_at: float
    bandwidth: float
    bulk_bytes_max: int
    bulk_bytes_max_beside_urgent: int

    def add(self, nbytes: int, urgent: bool, /) -> None:
        """Note bytes under way; negative ones are not any more."""


class RailLoad:
    """The load of a rail, in Python."""

    def __init__(self) -> None:
        self.open = False
        self.healthy = False
        self.attends_soon = False
        self.out_bytes = 0
        self.urgent_bytes = 0
        self.messages_done = 0
        self.bytes_done = 0
        self.progressed_at = 0.0
        self.bandwidth = 0.0
        self.bulk_bytes_max = 0
        self.bulk_bytes_max_beside_urgent = 0

    def add(self, nbytes: int, urgent: bool, /) -> None:
        """Note bytes under way."""
        self.out_bytes += nbytes
        if urgent:
            self.urgent_bytes += nbytes


class BooksLike(Protocol):
    """The numbers of all transfers to a peer, and the messages of the short way.

    Attributes:
        num_queued, urgent_queued: slices that wait for a rail, and the urgent of them: no message
            overtakes its own kind.
        stopped: nothing takes the short way.
        awaited: somebody may be waiting for a turn.
        urgent_at: when something urgent was posted last, `time.monotonic`.
        ahead_max: how far a number may be ahead of the oldest that is unfinished.
    """

    num_queued: int
    urgent_queued: int
    stopped: bool
    awaited: bool
    urgent_at: float
    ahead_max: int

    @property
    def oldest(self) -> int:
        """The lowest number that is unfinished; what is below can be forgotten."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the next number has to wait for the oldest transfer to end."""

    def take(self) -> int:
        """Return the next number; it is unfinished."""

    def end(self, number: int, /) -> None:
        """It is finished; idempotent."""

    def messages(self) -> list[Express]:
        """Return what is under way the short way."""

    def stop(self) -> list[Express]:
        """Close the short way, until `stopped` is taken back; return what is under way."""

    def pull(self, message: Express, /) -> bool:
        """Keep only its number from here on; False if it has ended, or is pulled already."""

    def __len__(self) -> int:
        """How many numbers are unfinished."""


class Books:
    """Numbers, in Python."""

    def __init__(self, ahead_max: int) -> None:
        self.num_queued = self.urgent_queued = 0
        self.stopped = False
        self.awaited = False
        self.urgent_at = float("-inf")
        self.ahead_max = ahead_max
        self._unfinished: dict[int, None] = {}
        self._following = 1

    @property
    def oldest(self) -> int:
        """The lowest number that is unfinished."""
        return next(iter(self._unfinished), self._following)

    @property
    def is_exhausted(self) -> bool:
        """Whether the next number has to wait."""
        return self._following >= self.oldest + self.ahead_max

    def take(self) -> int:
        """Return the next number."""
        number = self._following
        self._following = number + 1
        self._unfinished[number] = None
        return number

    def end(self, number: int, /) -> None:
        """It is finished."""
        self._unfinished.pop(number, None)

    def messages(self) -> list[Express]:
        """There are none."""
        return []

    def stop(self) -> list[Express]:
        """There are none."""
        return []

    def pull(self, message: Express, /) -> bool:
        """There are none."""
        return False

    def __len__(self) -> int:
        return len(self._unfinished)


def make_load() -> LoadLike:
    """Return the load of a rail, compiled where that was built."""
    return RailLoad() if native.compiled is None else native.compiled.RailLoad()


def make_books(
    rails: Sequence[LoadLike] = (),
    *,
    ahead_max: int = TRANSFERS_AHEAD_MAX,
    prefer: Callable[[Region], Tiers] | None = None,
    on_room: Callable[[], None] | None = None,
) -> BooksLike:
    """Return books, compiled where they were built.

    Args:
        rails: the loads of the peer's rails.
        ahead_max: how far a number may be ahead of the oldest that is unfinished.
        prefer: tiers of rails that suit a region's memory; None where there is nothing to choose.
        on_room: called when a message has ended while something was queued or awaited.
    """
    if native.compiled is None:
        return Books(ahead_max)
    books: BooksLike = native.compiled.Books(
        ahead_max=ahead_max, rails=tuple(rails), prefer=prefer, on_room=on_room
    )
    return books
