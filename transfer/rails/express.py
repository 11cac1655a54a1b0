"""The short way: one piece that travels as one request, with next to no books.

Most transfers of a running system are one piece, and nothing goes wrong with them. Such a one is
a single object, handle and request in one; one compiled call checks, numbers and sends it, one
waits for it and settles it (`compiled/message.c`). Only when it meets trouble (a connection
breaks, its deadline comes, the owner refuses) is it unfolded into the operation and the slice that
it would have been the long way, and treated as these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from transfer import native
from transfer.handle import Transfer
from transfer.memory.region import Region, RegionKey
from transfer.pieces import EMPTY, one_piece
from transfer.priority import URGENT_BYTES_MAX, Priority
from transfer.rails.books import BooksLike
from transfer.rails.slices import Operation, Slice
from transfer.statistics import Counts
from transfer.wire import PAYLOAD_BYTES_MAX, SLICE_BYTES, RequestKind


class Express(native.Message, Transfer):
    """A transfer of one piece over one rail to a peer.

    Attributes:
        part: its slice, once it was unfolded.
    """

    part: Slice | None = None
    wait_long = Transfer.wait

    @property
    def handle(self) -> Transfer:
        """What the caller waits for, as of an `Operation`."""
        return self

    def unfold(self) -> Slice:
        """Return its slice, of the operation that it is from now on; idempotent."""
        if self.part is None:
            operation = Operation(
                kind=RequestKind.WRITE if self.writes else RequestKind.READ,
                handle=self,
                token=self.token,
                region=self.region,
                immediate=self.immediate,
                note=self.note or b"",
                priority=self.priority,
                transfer_id=self.transfer_id,
                rails=self.rails,
                queued_at=self.started,
            )
            pieces = EMPTY
            if self.nbytes:  # else it is a note alone
                pieces = one_piece(
                    self.our_offset, self.their_offset, self.nbytes, write=self.writes
                )
            part = Slice(operation, 0, pieces, self.nbytes, attempts=1, oldest=self.oldest)
            part.posted_at = self.started
            operation.slices.append(part)
            # Two threads may find out at once: one slice is the right one for both.
            self.__dict__.setdefault("part", part)
        assert self.part is not None
        return self.part


class Copied(native.MappedCopy, Transfer):
    """A transfer of one piece that was a copy between mapped memories, and has ended well."""

    backend = "shared_memory"
    _finished = True
    wait_long = Transfer.wait


Post = Callable[..., Transfer | None]


class ShortWayLike(Protocol):
    """The short ways of an engine to its peers. Thread-safe.

    Attributes:
        timeout_s: of every transfer.
        on_post: called at the next post, and forgotten.
    """

    timeout_s: float
    on_post: Callable[[], None] | None

    @property
    def post(self) -> Post:
        """Send one piece at once, or copy it: (writes, peer, region, key, our offset, their offset,
        nbytes, immediate, priority, note=None). None if it has to go the long way.
        """

    def add(self, peer: str, books: BooksLike, /) -> None:
        """Open the short way to a peer."""

    def remove(self, peer: str, books: BooksLike, /) -> None:
        """Close it, if it is still these books'; idempotent."""

    def take_counts(self) -> Counts:
        """Return what was posted since the last call: bytes written and read, immediates, then
        operations and bytes of each class.
        """

    def map(self, peer: str, link: object, windows: Mapping[bytes, object], /) -> None:
        """Copy at once what lies in `windows`, by token, while the link has no `evidence`."""

    def unmap(self, peer: str, link: object, /) -> None:
        """Do so no more, if it is still this link's; idempotent."""

    def take_copied(self) -> Counts:
        """Return what was copied at once since the last call; as of `take_counts`."""


class NoShortWay:
    """Without the compiled part everything goes the long way."""

    timeout_s = 0.0
    on_post: Callable[[], None] | None = None

    def post(self, *arguments: object) -> None:
        """Take nothing."""

    def add(self, peer: str, books: BooksLike, /) -> None:
        """There is none."""

    def remove(self, peer: str, books: BooksLike, /) -> None:
        """There is none."""

    def take_counts(self) -> Counts:
        """Return zeros."""
        return 0, 0, 0, (0,) * len(Priority), (0,) * len(Priority)

    def map(self, peer: str, link: object, windows: Mapping[bytes, object], /) -> None:
        """There is none."""

    def unmap(self, peer: str, link: object, /) -> None:
        """There is none."""

    take_copied = take_counts


def make_short_way() -> ShortWayLike:
    """Return the short ways of an engine."""
    if native.compiled is None:
        return NoShortWay()
    way: ShortWayLike = native.compiled.ShortWay(
        region=Region,
        key=RegionKey,
        made=Express,
        copied=Copied,
        priorities=tuple(Priority),
        nbytes_max=PAYLOAD_BYTES_MAX,
        slice_bytes=SLICE_BYTES,
        urgent_bytes_max=URGENT_BYTES_MAX,
    )
    return way
