"""Writes and reads: the part of an engine that moves bytes."""

from __future__ import annotations

from typing import Final

from configs.schema import TransferConfig
from transfer.arguments import check_integer, check_type
from transfer.handle import Transfer
from transfer.memory.region import Region, RegionKey
from transfer.operations import Mover, deadline_after
from transfer.pages import Pages, pieces_of_pages
from transfer.peer import Peer, name_of
from transfer.pieces import CopyPieces, IntsLike, make_pieces
from transfer.prepared import InPlace, Prepared
from transfer.priority import Priority
from transfer.wire import NOTE_BYTES_MAX

BYTES_MAX: Final = 2**63 - 1


class Movement:
    """The writes and reads of a `TransferEngine`. Thread-safe.

    Every operation belongs to a class of traffic. Where `priority` is not given, a write with
    an immediate and anything of at most 64 KiB is `ACTIVATIONS` (somebody waits for it), a
    larger read is `KV_GET`, a larger write `KV_PUT`.
    """

    _config: TransferConfig
    _mover: Mover

    def write(
        self,
        peer: str | Peer,
        source: Region,
        target: RegionKey,
        source_offsets: IntsLike,
        target_offsets: IntsLike,
        lengths: IntsLike,
        *,
        immediate: int | None = None,
        priority: Priority | None = None,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Write pieces of our region into a peer's window.

        When the transfer has ended well, all bytes are in place. The immediate is counted at
        the peer once they are, and exactly once. A write of zero bytes with an immediate is a
        signal. Into mapped memory the copy is made before the call returns.

        Args:
            peer: the owner of `target`.
            source: our region; must not change until the transfer has ended.
            target: a key with the right to write.
            source_offsets: [N] int64 bytes into the region, or one integer.
            target_offsets: [N] int64 bytes into the window, or one integer.
            lengths: [N] int64 bytes, or one integer for all.
            immediate: uint32.
            priority: class of traffic; see the class.
            timeout_s: default `operation_timeout_s`.

        Raises:
            ValueError: the arguments do not fit our region.
            PeerLost, PeerUnknown, AccessRefused, TransferTimeout: known at once; what becomes
                known later is raised by the transfer.
        """
        name = peer if type(peer) is str else name_of(peer)
        if type(lengths) is int and timeout_s is None:
            at_once = self._mover.post_short(
                True, name, source, target, source_offsets, target_offsets, lengths, immediate,
                priority,
            ) or self._mover.move_at_once(
                name, source, target, source_offsets, target_offsets, lengths, immediate, priority,
                write=True,
            )  # fmt: skip
            if at_once is not None:
                return at_once
        deadline = deadline_after(timeout_s, self._config.operation_timeout_s)
        pieces = make_pieces(source_offsets, target_offsets, lengths)
        return self._mover.write(name, source, target, pieces, immediate, deadline, priority)

    def write_with_note(
        self,
        peer: str | Peer,
        source: Region,
        target: RegionKey,
        source_offset: int,
        target_offset: int,
        nbytes: int,
        note: bytes,
        *,
        priority: Priority | None = None,
        timeout_s: float | None = None,
    ) -> Transfer | None:
        """Write one piece, and leave a note with it; None if no notes go to this memory.

        The peer has the note for `take_notes` once all bytes are in place, exactly once, and before
        the transfer has ended well. Of a transfer that failed the note may be there, but then all
        bytes are. Nobody is woken for it. A write of zero bytes leaves the note alone.

        Notes go over tcp only. None of the bytes was written where this returns None: `write`, and
        `notify` when that has ended.

        Args:
            peer: the owner of `target`.
            source: as of `write`.
            target: as of `write`.
            source_offset: bytes into the region.
            target_offset: bytes into the window.
            nbytes: how many.
            note: 1 byte to `NOTE_BYTES_MAX`.
            priority: class of traffic; see the class.
            timeout_s: default `operation_timeout_s`.

        Raises:
            As `write`.
        """
        name = peer if type(peer) is str else name_of(peer)
        if not 1 <= len(check_type("a note", note, bytes)) <= NOTE_BYTES_MAX:
            raise ValueError(f"a note has 1 to {NOTE_BYTES_MAX} bytes, not {len(note)}")
        if timeout_s is None:
            at_once = self._mover.post_short(
                True, name, source, target, source_offset, target_offset, nbytes, None, priority,
                note,
            )  # fmt: skip
            if at_once is not None:
                return at_once
        deadline = deadline_after(timeout_s, self._config.operation_timeout_s)
        for what, number in (("source_offset", source_offset), ("target_offset", target_offset),
                             ("nbytes", nbytes)):  # fmt: skip
            check_integer(what, number, 0, BYTES_MAX)
        pieces = make_pieces(source_offset, target_offset, nbytes)
        return self._mover.write_with_note(name, source, target, pieces, note, deadline, priority)

    def read(
        self,
        peer: str | Peer,
        target: Region,
        source: RegionKey,
        target_offsets: IntsLike,
        source_offsets: IntsLike,
        lengths: IntsLike,
        *,
        priority: Priority | None = None,
        timeout_s: float | None = None,
        copy: CopyPieces | None = None,
    ) -> Transfer:
        """Read pieces of a peer's window into our region. As `write`, in the other direction.

        Where bytes of a peer's storage come by way of buffers of this process, `copy` takes them
        out of there, in other threads: a few calls, each for whole pieces where these are not
        longer than a buffer. So whoever reads can look at the bytes in the same pass. Other ways
        do not call it.
        """
        name = peer if type(peer) is str else name_of(peer)
        if type(lengths) is int and timeout_s is None:
            at_once = self._mover.post_short(
                False, name, target, source, target_offsets, source_offsets, lengths, None,
                priority,
            ) or self._mover.move_at_once(
                name, target, source, target_offsets, source_offsets, lengths, None, priority,
                write=False,
            )  # fmt: skip
            if at_once is not None:
                return at_once
        deadline = deadline_after(timeout_s, self._config.operation_timeout_s)
        pieces = make_pieces(source_offsets, target_offsets, lengths)
        return self._mover.read(name, target, source, pieces, deadline, priority, copy)

    def write_pages(
        self,
        peer: str | Peer,
        source: Region,
        target: RegionKey,
        source_pages: Pages,
        target_pages: Pages,
        page_bytes: int,
        *,
        immediate: int | None = None,
        priority: Priority | None = None,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Write pages of our region into pages of a peer's window, the i-th into the i-th.

        There must be as many target as source pages; of each `page_bytes` bytes are moved, at
        most either stride. All else is as of `write`.
        """
        deadline = deadline_after(timeout_s, self._config.operation_timeout_s)
        pieces = pieces_of_pages(source_pages, target_pages, page_bytes)
        return self._mover.write(
            name_of(peer), source, target, pieces, immediate, deadline, priority
        )

    def read_pages(
        self,
        peer: str | Peer,
        target: Region,
        source: RegionKey,
        target_pages: Pages,
        source_pages: Pages,
        page_bytes: int,
        *,
        priority: Priority | None = None,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Read pages of a peer's window into pages of our region. As `write_pages`."""
        deadline = deadline_after(timeout_s, self._config.operation_timeout_s)
        pieces = pieces_of_pages(source_pages, target_pages, page_bytes)
        return self._mover.read(name_of(peer), target, source, pieces, deadline, priority)

    def in_place(self, peer: str | Peer, target: RegionKey) -> InPlace | None:
        """Return a peer's memory for assembling bytes in it; None where it is not mapped here yet.

        The first `write` under a key maps it, where it can be. All else is as of a write: the
        key must give the right to, and what was withdrawn meanwhile is read by nobody.
        """
        return self._mover.in_place(name_of(peer), check_type("a key", target, RegionKey))

    def prepare_write(
        self,
        peer: str | Peer,
        source: Region,
        target: RegionKey,
        source_offsets: IntsLike,
        target_offsets: IntsLike,
        lengths: IntsLike,
        *,
        priority: Priority | None = None,
    ) -> Prepared:
        """Check a write that will be posted again and again, once. Arguments as of `write`.

        The pieces must not be changed afterwards; the bytes of the region may, between posts.

        Raises:
            ValueError, AccessRefused, PeerLost, PeerUnknown: as `write`.
        """
        pieces = make_pieces(source_offsets, target_offsets, lengths)
        return Prepared(
            self._mover,
            name_of(peer),
            source,
            target,
            pieces,
            write=True,
            priority=priority,
            timeout_s=self._config.operation_timeout_s,
        )

    def prepare_read(
        self,
        peer: str | Peer,
        target: Region,
        source: RegionKey,
        target_offsets: IntsLike,
        source_offsets: IntsLike,
        lengths: IntsLike,
        *,
        priority: Priority | None = None,
    ) -> Prepared:
        """Check a read that will be posted again and again, once. As `prepare_write`."""
        pieces = make_pieces(source_offsets, target_offsets, lengths)
        return Prepared(
            self._mover,
            name_of(peer),
            target,
            source,
            pieces,
            write=False,
            priority=priority,
            timeout_s=self._config.operation_timeout_s,
        )
