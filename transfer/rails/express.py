"""The short way: one piece that travels as one request, with next to no books.

Most transfers of a running system are one piece, and nothing goes wrong with them. Such a one is
a single object, handle and request in one, that the lane gives back when it is answered. Only
when it meets trouble (a connection breaks, its deadline comes, the owner refuses) is it unfolded
into the operation and the slice that it would have been the long way, and treated as these are.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, cast

from transfer.handle import Transfer
from transfer.memory.region import Region
from transfer.pieces import one_piece
from transfer.priority import Priority
from transfer.rails.slices import Operation, Slice
from transfer.wire import SLICE_BYTES, RequestKind

if TYPE_CHECKING:
    from transfer.rails.rail import ExpressLink

EXPRESS_BYTES_MAX: Final = SLICE_BYTES


class Express(Transfer):
    """A transfer of one piece over one rail to a peer.

    Attributes:
        writes: whether it is a write.
        token: names the owner's window.
        region: our memory.
        our_offset, their_offset: bytes into the region and the window.
        immediate: counted at the owner once the bytes are in place.
        priority: its class of traffic.
        transfer_id: unique per peer, ascending.
        rail_idx: which rail it took.
        rails: tiers of rails that suit our memory, as of an `Operation`.
        oldest: lowest transfer id that was unfinished when it was posted.
        lane: what carries it; the link's own.
        part: its slice, once it was unfolded.
    """

    transfer_id = 0
    rail_idx = 0
    rails: tuple[tuple[int, ...], ...] = ()
    oldest = 0
    lane: object = None
    part: Slice | None = None

    def __init__(
        self,
        peer: str,
        writes: bool,
        region: Region,
        token: bytes,
        our_offset: int,
        their_offset: int,
        nbytes: int,
        immediate: int | None,
        priority: Priority,
        timeout_s: float,
    ) -> None:
        self.peer = peer
        self.writes = writes
        self.operation = "write" if writes else "read"
        self.region = region
        self.token = token
        self.our_offset = our_offset
        self.their_offset = their_offset
        self.nbytes = nbytes
        self.immediate = immediate
        self.priority = priority
        self.started = now = time.monotonic()
        self.deadline = now + timeout_s
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        """As of any transfer; its lane is led the short way first."""
        if not self._finished and timeout_s is None and self.link is not None:
            cast("ExpressLink", self.link).lead(self)
        super().wait(timeout_s)

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
                priority=self.priority,
                transfer_id=self.transfer_id,
                rails=self.rails,
                queued_at=self.started,
            )
            pieces = one_piece(self.our_offset, self.their_offset, self.nbytes, write=self.writes)
            part = Slice(operation, 0, pieces, self.nbytes, attempts=1, oldest=self.oldest)
            part.posted_at = self.started
            operation.slices.append(part)
            self.part = part
        return self.part
