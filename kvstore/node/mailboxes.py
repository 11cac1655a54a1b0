"""What clients leave for a node: in mailboxes, one for each client of its host (see
`kvstore/mailbox.py`), and with their writes, where the engine keeps it.

    segment.index ─▶ catch_up ─▶ notes of all, by their stamps ─▶ indices
    a note is sent ─▶ catch_up, up to its stamp ─▶ that note

What a note says of a place holds until somebody else is given the place, which happens after the
note was left; so in the order of stamps the last one is right. A note that was sent can come late:
then it gives way to those that were taken before it and have later stamps.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import add, itemgetter
from typing import TYPE_CHECKING, Final

import msgspec.structs

from kvstore import copying, mailbox
from kvstore.node.indexed_block import blocks_of, columns_of
from kvstore.wire.left_notes import Note, NoteMalformed, Row, columns_of_rows, read_note
from kvstore.wire.messages import HeldBlocks
from kvstore.wire.peer_messages import Unwritten, Written
from transfer import Access, TransferError, allocate

if TYPE_CHECKING:
    from transfer import Memory, Region, RegionKey, TransferEngine

logger = logging.getLogger(__name__)

MAILBOXES_MAX: Final = 256
PORTION_BYTES: Final = 32 << 10  # of notes, at least, that are read before they are entered
RECENT_MAX: Final = 4096  # taken notes that are remembered for those that come late
RECENT_BLOCKS_MAX: Final = 1 << 16  # of those together

Said = Note | Row

_EPOCH_NS: Final = time.time_ns() - time.monotonic_ns()


@dataclass(slots=True, eq=False, kw_only=True)
class _Mailbox:
    """`taken`: how far it was read. `is_broken`: what is there makes no sense."""

    memory: Memory
    region: Region
    key: RegionKey
    address: int
    nbytes: int
    taken: int = 0
    is_broken: bool = False


class Mailboxes:
    """Thread-safe.

    Args:
        engine: The node's.
        enter: Takes what is said about one segment, in order.
    """

    def __init__(
        self, engine: TransferEngine, enter: Callable[[int, Sequence[Said]], None]
    ) -> None:
        self._engine = engine
        self._enter = enter
        self._lock = threading.RLock()
        self._boxes: dict[str, _Mailbox] = {}
        # stamp, segment, what was said (of many blocks no more than where they are)
        self._recent: deque[tuple[int, int, Said]] = deque()
        self._recent_blocks = 0
        self._left: list[tuple[int, bytes]] = []  # with writes, and not entered yet
        self._clock = mailbox.clock_name()
        self._closed = False
        engine.on_notes(self.catch_up)
        engine.on_peer_lost(lambda peer, evidence: self.remove(peer))

    def offer_to(self, peer: str) -> tuple[bytes, str]:
        """Return the key to a client's mailbox, and its clock; no key if it can have none."""
        if not mailbox.is_available() or peer == self._engine.name:
            return b"", ""
        self._remove_strangers()
        with self._lock:
            box = self._boxes.get(peer)
            if box is None:
                if self._closed or len(self._boxes) >= MAILBOXES_MAX:
                    return b"", ""
                box = self._boxes[peer] = self._make(peer)
            return box.key.encode(), self._clock

    def catch_up(self, until_ns: int | None = None) -> None:
        """Take what was left before now, or before that time of the monotonic clock.

        Whoever looks at what notes are about does so first.
        """
        with self._lock:
            self._take(until_ns)

    def take_sent(self, note: Note) -> None:
        """Take a note that did not come by a mailbox."""
        with self._lock:
            self.catch_up(note.stamp or None)
            kept = self._without_late(note)
            if kept is not None:
                self._enter(note.segment, [kept])
                if note.stamp:
                    self._remember([(note.stamp, note.segment, kept)])

    def remove(self, peer: str) -> None:
        """A client is gone: take what it left, and free its mailbox."""
        with self._lock:
            box = self._boxes.get(peer)
            if box is None:
                return
            self._close(box)
            self._take(None)
            del self._boxes[peer]
        self._free(box)

    def close(self) -> None:
        """Take what was left, and free all; idempotent."""
        with self._lock:
            self._closed = True
            for box in self._boxes.values():
                self._close(box)
            self._take(None)
            boxes, self._boxes = self._boxes, {}
        for box in boxes.values():
            self._free(box)

    def _make(self, peer: str) -> _Mailbox:
        nbytes = mailbox.MAILBOX_BYTES
        memory = allocate(nbytes, huge_pages=False)
        region = self._engine.register(memory)
        key = self._engine.offer(region, to=peer, access=Access.READ | Access.WRITE)
        address = region.start
        return _Mailbox(memory=memory, region=region, key=key, address=address, nbytes=nbytes)

    def _free(self, box: _Mailbox) -> None:
        self._engine.release(box.region)
        box.memory.close()

    def _remove_strangers(self) -> None:
        """Remove the mailboxes of those whom the engine has cut off without a word to us."""
        for peer in list(self._boxes):
            try:
                self._engine.peer(peer)
            except TransferError:
                self.remove(peer)

    # -- under the lock -------------------------------------------------------------------------

    def _close(self, box: _Mailbox) -> None:
        assert copying.compiled is not None
        copying.compiled.mailbox_close(box.address, box.nbytes)

    def _take(self, until_ns: int | None) -> None:
        """Take the notes of all mailboxes up to a time, which is before any of them is read.

        Hence with each note those are taken that were left before it was thought of.
        """
        until = time.monotonic_ns() if until_ns is None else until_ns
        self._left += [(stamp, note) for _, stamp, note in self._engine.take_notes()]
        taken = bisect_right(self._left, until, key=itemgetter(0))
        stamped, self._left = self._left[:taken], self._left[taken:]
        for peer, box in self._boxes.items():
            if box.is_broken:
                continue
            assert copying.compiled is not None
            try:
                box.taken, notes = copying.compiled.mailbox_take(
                    box.address, box.nbytes, box.taken, until
                )
            except ValueError as error:
                logger.warning("mailbox of %s: %s", peer, error)
                box.is_broken = True
                self._close(box)
                continue
            stamped += notes
        if not stamped:
            return
        stamped.sort(key=lambda each: each[0])
        for portion in _portions(stamped):
            read = [said for stamp, payload in portion for said in _read(stamp, payload)]
            for segment, run in groupby(read, key=itemgetter(1)):
                self._enter(segment, [said for _, _, said in run])
            self._remember(read)

    def _remember(self, taken: Iterable[tuple[int, int, Said]]) -> None:
        recent = self._recent
        for stamp, segment, said in taken:
            if isinstance(said, Written):
                places = HeldBlocks(offsets=said.held.offsets, lengths=said.held.lengths)
                recent.append((stamp, segment, msgspec.structs.replace(said, held=places)))
            else:
                recent.append((stamp, segment, said))
            self._recent_blocks += _num_blocks(said)
        while len(recent) > RECENT_MAX or self._recent_blocks > RECENT_BLOCKS_MAX:
            self._recent_blocks -= _num_blocks(recent.popleft()[2])

    def _without_late(self, note: Note) -> Note | None:
        """Return a sent note, or what is left of it where later ones were taken before it."""
        if not note.stamp:
            return note
        later = [
            said
            for stamp, segment, said in self._recent
            if stamp > note.stamp and segment == note.segment
        ]
        if isinstance(note, Unwritten):
            # To writes alone: what is taken back later may be a write that comes later still.
            writes = (_bounds(said) for said in later if not isinstance(said, Unwritten))
            return None if any(note.offset in begin for begin, _ in writes) else note
        if not later:
            return note
        starts: list[int] = []
        ends: list[int] = []
        for said in later:
            begin, end = _bounds(said)
            starts += begin
            ends += end
        starts.sort()
        ends.sort()

        def is_free(start: int, end: int) -> bool:
            """As many of the later ones end before these bytes as begin before their end."""
            return bisect_left(starts, end) <= bisect_right(ends, start)

        held = note.held
        if not held.chunk_bytes and all(
            map(is_free, held.offsets, map(add, held.offsets, held.lengths))
        ):
            return note  # as nearly always
        kept = [block for block in blocks_of(held) if is_free(block.offset, block.end)]
        return msgspec.structs.replace(note, held=columns_of(kept)) if kept else None


def told_at(monotonic_ns: int) -> int:
    """Return a stamp as `HeldBlocks` has it: those of a node rise whatever its clock is set to."""
    return monotonic_ns + _EPOCH_NS


def joined(said: Iterable[Said]) -> Iterator[tuple[HeldBlocks | Unwritten, int]]:
    """Put together what is said about one segment, in order; with the time, if rows have none."""
    for kind, run in groupby(said, key=type):
        if kind is tuple:
            yield columns_of_rows([row for row in run if isinstance(row, tuple)]), 0
            continue
        for note in run:
            assert not isinstance(note, tuple), note
            told_ns = told_at(note.stamp or time.monotonic_ns())
            yield (note if isinstance(note, Unwritten) else note.held), told_ns


def _portions(stamped: list[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Split notes into what is read at once: what is made of all would not stay in a cache."""
    portion: list[tuple[int, bytes]] = []
    nbytes = 0
    for note in stamped:
        portion.append(note)
        nbytes += len(note[1])
        if nbytes >= PORTION_BYTES:
            yield portion
            portion, nbytes = [], 0
    if portion:
        yield portion


def _read(stamp: int, payload: bytes) -> Iterator[tuple[int, int, Said]]:
    try:
        read = read_note(payload, told_at(stamp))
    except NoteMalformed as error:
        logger.warning("malformed note in a mailbox: %s", error)
        return
    if isinstance(read, tuple):
        yield stamp, *read
    else:
        yield stamp, read.segment, msgspec.structs.replace(read, stamp=stamp)


def _bounds(said: Said) -> tuple[Sequence[int], Sequence[int]]:
    """Return where what was said begins and ends; nothing of what makes no sense."""
    if isinstance(said, Unwritten):
        return (said.offset,), (said.offset + 1,)
    if isinstance(said, tuple):
        return (said[0],), (said[0] + said[1],)
    offsets, lengths = said.held.offsets, said.held.lengths
    if len(offsets) != len(lengths) or min(lengths, default=0) <= 0:
        return (), ()
    return offsets, list(map(add, offsets, lengths))


def _num_blocks(said: Said) -> int:
    return len(said.held.offsets) if isinstance(said, Written) else 1
