"""Rails: the ways to one peer, and the narrow protocol between them and the sprayer.

A rail is a pair of network addresses (or devices), ours and the peer's. Its link is what is open
over it now: sockets, or queue pairs. The sprayer decides which slice goes over which rail; a
link moves bytes and says how that ended.

Locks: a link never calls its sink from within `post`, `room` or `give_up`, and holds no lock of
its own that these take while it calls the sink. So the sprayer may hold its lock around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from transfer.handle import Transfer
from transfer.rails.books import LoadLike
from transfer.rails.slices import Slice
from transfer.wire import Status


@dataclass(frozen=True, slots=True)
class RailName:
    """Which way. Equal names are the same rail, over the lives of its links.

    Attributes:
        backend: "tcp" or "verbs".
        local: our address, or our device with port.
        remote: the peer's.
    """

    backend: str
    local: str
    remote: str

    def __str__(self) -> str:
        return f"{self.backend} {self.local}->{self.remote}"


class RailState(StrEnum):
    """Health of a rail, as the sprayer sees it.

    A healthy rail that breaks or stalls is cooling; when its backoff is over it is opened again
    and probing; the first slice that is done over it makes it healthy, a failure cools it again.
    """

    HEALTHY = "healthy"
    COOLING = "cooling"
    PROBING = "probing"


class RailLink(Protocol):
    """What is open over one rail to one peer. All methods may be called from any thread."""

    @property
    def rail(self) -> RailName:
        """The rail it runs over."""

    @property
    def orders_immediates(self) -> bool:
        """Whether the owner counts a slice's immediate once all slices are in place (tcp).

        If not (verbs), the sprayer lets an operation of several slices end with an empty slice
        that carries the immediate, posted when all others are done.
        """

    @property
    def drops_late_writes(self) -> bool:
        """Whether a write that was sent a second time elsewhere may be left under way.

        True where the owner drops what it has (tcp); False where late bytes would land (verbs).
        """

    def room(self, urgent: bool) -> int:
        """How many slices it would take now, in its lanes for urgent or for bulk traffic."""

    def post(self, part: Slice) -> None:
        """Send a slice; never blocks.

        A failure is told to the sink later, from `progress` or the engine's thread.
        """

    def progress(self, handle: Transfer, timeout_s: float) -> bool:
        """Let a thread that waits for a transfer over this link move its bytes, until something
        ended.

        It leads what carries the transfer's slices from its first call until it calls `leave`.

        Returns:
            False, at once, if other threads are at it, or if threads cannot help.
        """

    def leave(self) -> None:
        """End the lead of the calling thread, if it has it: the engine's thread takes over."""

    def attend(self) -> None:
        """Let the engine's thread move what is under way, because nobody waits. At every tick."""

    def suspect(self, evidence: str) -> None:
        """Nothing has come to its end for too long while another rail is well. Never waits.

        A link whose late writes would land ends, and tells the sink what was lost with it.
        """

    def give_up(self, slices: Sequence[Slice]) -> Sequence[Slice]:
        """Forget slices. After the return this side's memory is not touched for them any more.

        Returns:
            Other slices that were lost with them (a connection had to be torn down): not done,
            to be sent again.
        """

    def close(self) -> None:
        """Close; idempotent. Nothing is told to the sink any more, no memory is touched."""

    def abandon(self) -> None:
        """Close the descriptors only, touching no lock: the way out after a fork."""


Outcome = tuple[object, int, tuple[int, int, int] | None]


class LaneLink(RailLink, Protocol):
    """A link made of lanes: they take the short way, and are led together with those of others."""

    def bind(self, load: LoadLike) -> None:
        """Tell from here on which lanes there are."""

    def claim(self, handle: Transfer) -> Sequence[object]:
        """Return the lanes that the calling thread leads from here on, for a transfer."""

    def move(self, lanes: Sequence[object], timeout_s: float) -> Sequence[Outcome]:
        """Move the bytes of lanes, of this link or of others like it, until something ended.

        Returns:
            What ended and was not settled: (item, status, place).
        """

    def carries(self, item: object) -> bool:
        """Whether it was posted over this link."""

    def report(self, finished: Sequence[Outcome], lanes: Sequence[object]) -> None:
        """Tell the sink what has ended, and of those of the lanes that are broken."""


class SliceSink(Protocol):
    """Who hears how slices ended: the sprayer. Any thread, with no lock of the link held."""

    def done(self, link: RailLink, finished: Sequence[tuple[Slice, Status]]) -> None:
        """Slices were answered by the owner, well or with a refusal. At most once per post."""

    def failed(self, link: RailLink, slices: Sequence[Slice], evidence: str) -> None:
        """Slices were lost, and the link goes on (one of its connections broke)."""

    def broken(self, link: RailLink, evidence: str) -> None:
        """The link is over, with all slices it had. Its memory is not touched any more."""
