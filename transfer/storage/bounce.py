"""Bounce buffers, and the ends between which they carry bytes.

A step of a staged transfer is one buffer full: the source *fills* the buffer, the target *drains*
it. An end is own host memory, own storage, a peer's window, or a peer's storage; any two of them
make a transfer.

    source pieces   |--0--|   |---1---|      |-2-|
    buffer          |--0--|---1---|-2-|             packed, in order
    target pieces   |--0--|          |---1---|-2-|
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final, Protocol

from transfer.handle import Transfer
from transfer.memory.memory import Memory, allocate
from transfer.memory.region import Access, Bytes, OfferTable, Region, RegionKey, make_offer
from transfer.pieces import CopyPieces, Ints, Pieces, copy_pieces, packed
from transfer.priority import Priority
from transfer.storage.storage import Storage, StorageRegion, fetch_now, store_now

# An ask costs both processes as much as copying a megabyte: so a few at a time.
BUFFER_BYTES: Final = 4 << 20

_Place = tuple[int, int, str]  # lane, which of that lane's, peer


class PeerMoves(Protocol):
    """What moves host memory to and from peers: the engine's `Mover`."""

    def write(
        self,
        peer: str,
        source: Region,
        target: RegionKey,
        pieces: Pieces,
        immediate: int | None,
        deadline: float,
        priority: Priority | None = None,
    ) -> Transfer:
        """As `Mover.write`."""

    def read(
        self,
        peer: str,
        target: Region,
        source: RegionKey,
        pieces: Pieces,
        deadline: float,
        priority: Priority | None = None,
    ) -> Transfer:
        """As `Mover.read`."""


class Bounce:
    """One bounce buffer: shareable host memory.

    Attributes:
        region: the buffer.
        key: opens it to one peer, for what only the peer can move; None if nobody needs it.
        lent: somebody uses it. Guarded by the lock of its `Bounces`.
    """

    def __init__(self, region: Region, memory: Memory, key: RegionKey | None) -> None:
        self.region = region
        self.key = key
        self.lent = False
        self._memory = memory

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class Bounces:
    """The buffers of a few threads, of each thread one, and more per peer that is given a key.

    A buffer has one user at a time, since it is one thread's: whatever moves by way of it, reads
    and writes alike. What a peer may write is that peer's alone, so its buffers are never used for
    others. After a failure a buffer may still be written to, so it is used no more. Thread-safe.
    """

    def __init__(self, offers: OfferTable) -> None:
        self._offers = offers
        self._lock = threading.Lock()
        self._buffers: dict[_Place, Bounce] = {}

    @contextlib.contextmanager
    def borrow(self, lane: int, peer: str = "", nth: int = 0) -> Iterator[Bounce]:
        """Use a buffer of a thread.

        Args:
            lane: the thread that calls.
            peer: if any, one that this peer can access.
            nth: which one, for a thread that uses several at once.
        """
        place = lane, nth, peer
        with self._lock:
            bounce = self._buffers.get(place)
            if bounce is None:
                bounce = self._buffers[place] = self._make(peer)
            assert not bounce.lent, f"buffer {place} has a user already"
            bounce.lent = True
        try:
            yield bounce
        except BaseException:
            with self._lock:
                self._drop(place)
            raise
        else:
            with self._lock:
                bounce.lent = False

    def forget(self, peer: str) -> None:
        """Drop the buffers of a peer that is gone."""
        with self._lock:
            for place in [place for place in self._buffers if place[2] == peer]:
                self._drop(place)

    def close(self) -> None:
        """Drop all."""
        with self._lock:
            for place in list(self._buffers):
                self._drop(place)

    def _make(self, peer: str) -> Bounce:
        memory = allocate(BUFFER_BYTES)
        region = Region(memory)
        if not peer:
            return Bounce(region, memory, None)
        offer = make_offer(
            region, to=peer, access=Access.READ | Access.WRITE, offset=0, nbytes=None
        )
        return Bounce(region, memory, self._offers.add(offer))

    def _drop(self, place: _Place) -> None:
        bounce = self._buffers.pop(place, None)
        if bounce is None:
            return
        if bounce.key is not None:
            self._offers.withdraw(bounce.key.token)
        bounce.close()


class End(Protocol):
    """One side of a staged transfer. Both methods wait until they are done."""

    def fill(self, bounce: Bounce, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Bring pieces of this end into the buffer, packed. Raises `TransferError`."""

    def drain(self, bounce: Bounce, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Bring the packed pieces from the buffer to this end. Raises `TransferError`."""


class HostEnd:
    """Host memory of this process.

    Args:
        region: the memory.
        copy: copies out of a buffer; default `copy_pieces`.
    """

    def __init__(self, region: Region, copy: CopyPieces = copy_pieces) -> None:
        self._array = region.array
        self._copy = copy

    def fill(self, bounce: Bounce, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Copy."""
        copy_pieces(bounce.region.array, self._array, Pieces(offsets, packed(lengths), lengths))

    def drain(self, bounce: Bounce, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Copy."""
        self._copy(self._array, bounce.region.array, Pieces(packed(lengths), offsets, lengths))


class StorageEnd:
    """A storage of this process; offsets count from `base`."""

    def __init__(self, storage: Storage, base: int = 0) -> None:
        self._storage = storage
        self._base = base

    def fill(self, bounce: Bounce, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Fetch, and wait."""
        self.read(bounce.region.array, offsets, lengths, deadline)

    def drain(self, bounce: Bounce, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Store, and wait."""
        self.write(bounce.region.array, offsets, lengths, deadline)

    def read(self, target: Bytes, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Fetch pieces into host memory, packed, and wait."""
        pieces = Pieces(offsets + self._base, packed(lengths), lengths)
        fetch_now(self._storage, target, pieces, deadline)

    def write(self, source: Bytes, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Store packed pieces of host memory, and wait."""
        pieces = Pieces(packed(lengths), offsets + self._base, lengths)
        store_now(self._storage, source, pieces, deadline)


class PeerEnd:
    """A peer's window of host memory."""

    def __init__(
        self, moves: PeerMoves, peer: str, key: RegionKey, priority: Priority | None
    ) -> None:
        self._moves = moves
        self._peer = peer
        self._key = key
        self._priority = priority

    def fill(self, bounce: Bounce, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Read from the peer."""
        pieces = Pieces(offsets, packed(lengths), lengths)
        self._moves.read(
            self._peer, bounce.region, self._key, pieces, deadline, self._priority
        ).wait()

    def drain(self, bounce: Bounce, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Write to the peer."""
        pieces = Pieces(packed(lengths), offsets, lengths)
        self._moves.write(
            self._peer, bounce.region, self._key, pieces, None, deadline, self._priority
        ).wait()


def near_end(region: Region, copy: CopyPieces | None = None) -> End:
    """The end of a region of this process; `copy` as of `HostEnd`."""
    if isinstance(region, StorageRegion):
        return StorageEnd(region.storage)
    return HostEnd(region, copy or copy_pieces)


class StagedWork:
    """A transfer from one end to the other, one buffer after the other. Work of a `BatchQueue`."""

    def __init__(
        self,
        bounces: Bounces,
        source: End,
        target: End,
        steps: list[Pieces],
        *,
        peer: str,
        deadline: float,
    ) -> None:
        self._bounces = bounces
        self._source = source
        self._target = target
        self._steps = steps
        self._peer = peer
        self._deadline = deadline

    def __len__(self) -> int:
        return len(self._steps)

    def weigh(self, index: int) -> int:
        """Bytes of a step."""
        return self._steps[index].nbytes

    def perform(self, index: int, lane: int) -> None:
        """Fill a buffer and drain it."""
        step = self._steps[index]
        with self._bounces.borrow(lane, self._peer) as bounce:
            self._source.fill(bounce, step.source_offsets, step.lengths, self._deadline)
            self._target.drain(bounce, step.target_offsets, step.lengths, self._deadline)
