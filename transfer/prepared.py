"""Writes without a copy of their own, and transfers that are checked once and posted often."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer import native
from transfer.arguments import check_integer, check_timeout
from transfer.handle import Transfer
from transfer.immediates import IMMEDIATE_MAX
from transfer.memory.region import Region, RegionKey
from transfer.pieces import Pieces
from transfer.priority import Priority, class_of

if TYPE_CHECKING:
    from transfer.backends.shared_memory import Window
    from transfer.memory.copy_on_write import CopyOnWrite
    from transfer.operations import Mover
    from transfer.peer import PeerLink


class InPlace:
    """A peer's memory that is mapped here: bytes are assembled in it, then announced.

    Made by the engine's `in_place`. Thread-safe.

    Attributes:
        array: [nbytes] uint8, the peer's memory.
    """

    __slots__ = ("_link", "_mover", "_window", "array")

    def __init__(self, mover: Mover, link: PeerLink, window: Window) -> None:
        self._mover = mover
        self._link = link
        self._window = window
        self.array = window.array

    @property
    def live(self) -> bool:
        """Whether the peer is there and the key was not withdrawn."""
        return self._window.live and self._link.alive

    def announce(self, nbytes: int, immediate: int, *, timeout_s: float | None = None) -> Transfer:
        """Count an immediate at the peer, as after a write of `nbytes`.

        Raises:
            PeerLost: it is gone.
        """
        check_integer("nbytes", nbytes, 0, self.array.size)
        _check_post(immediate, timeout_s, write=True)
        return self._mover.account(
            self._link, nbytes, immediate, None, write=True, timeout_s=timeout_s
        )

    def copy_on_write(self) -> CopyOnWrite | None:
        """Return the memory for who might write into what is only to be read.

        None if it is a part of a memory file only. Raises OSError.
        """
        memory = self._window.memory
        if self._window.start != memory.array.ctypes.data:
            return None
        return memory.copy_on_write()

    def read_bytes(self, nbytes: int) -> None:
        """Count bytes that the caller has copied out of the memory, as of a read."""
        self._mover.tally.read("shared_memory", nbytes, Priority.KV_GET)

    def wrote_bytes(self, nbytes: int) -> None:
        """Count bytes that the caller has copied into the memory, as of a write."""
        self._mover.tally.wrote("shared_memory", nbytes, False, Priority.KV_PUT)


class Prepared:
    """A write or read with fixed places. Made by the engine's `prepare_write`, `prepare_read`.

    Thread-safe. Where the peer's memory is mapped, a post is a copy between addresses that are
    known already; elsewhere it is the plain operation with its pieces already made.
    """

    __slots__ = (
        "_deadline_s",
        "_key",
        "_link",
        "_mover",
        "_nbytes",
        "_offsets",
        "_peer",
        "_pieces",
        "_priority",
        "_region",
        "_remote",
        "_source",
        "_target",
        "_window",
        "_write",
    )

    def __init__(
        self,
        mover: Mover,
        peer: str,
        region: Region,
        key: RegionKey,
        pieces: Pieces,
        *,
        write: bool,
        priority: Priority | None,
        timeout_s: float,
    ) -> None:
        self._mover = mover
        self._peer = peer
        self._region = region
        self._key = key
        self._pieces = pieces
        self._nbytes = pieces.nbytes
        self._write = write
        self._deadline_s = timeout_s
        self._priority = priority
        class_of(priority, 0, None, write=write)
        self._link, self._window = mover.prepare(peer, region, key, pieces, write=write)
        self._source = self._target = 0
        if len(pieces) == 1:
            starts = int(pieces.source_offsets[0]), int(pieces.target_offsets[0])
            self._offsets = starts if write else starts[::-1]
        if self._window is not None:
            ours, theirs = region.start, self._window.start
            self._source, self._target = (ours, theirs) if write else (theirs, ours)
            if len(pieces) == 1:
                self._source += int(pieces.source_offsets[0])
                self._target += int(pieces.target_offsets[0])

    def post(self, *, immediate: int | None = None, timeout_s: float | None = None) -> Transfer:
        """Do it once more.

        Args:
            immediate: uint32, counted at the peer once the bytes are in place; writes only.
            timeout_s: default `operation_timeout_s`.

        Raises:
            ValueError: an immediate with a read.
            PeerLost, AccessRefused, TransferTimeout: as of `write` and `read`.
        """
        link, window = self._link, self._window
        if window is None or link is None or not window.live or not link.alive:
            return self._post_anew(immediate, timeout_s)
        _check_post(immediate, timeout_s, write=self._write)
        pieces = self._pieces
        if len(pieces) == 1:
            if immediate is None and (at_once := self._post_at_once(None)) is not None:
                return at_once
            native.copy_one(self._target, self._source, self._nbytes)
        else:
            native.copy_pieces(
                self._target,
                self._source,
                pieces.target_offsets,
                pieces.source_offsets,
                pieces.lengths,
            )
        return self._mover.account(
            link, self._nbytes, immediate, self._priority, write=self._write, timeout_s=timeout_s
        )

    def _post_at_once(self, immediate: int | None) -> Transfer | None:
        """One piece, by one compiled call, where that can be."""
        ours, theirs = self._offsets
        return self._mover.post_short(
            self._write, self._peer, self._region, self._key, ours, theirs, self._nbytes, immediate,
            self._priority,
        )  # fmt: skip

    def _post_anew(self, immediate: int | None, timeout_s: float | None) -> Transfer:
        """The way of `write` and `read`: it maps a window again, and says what is wrong."""
        mover = self._mover
        if len(self._pieces) == 1 and timeout_s is None:
            ours, theirs = self._offsets
            at_once = self._post_at_once(immediate) or mover.move_at_once(
                self._peer, self._region, self._key, ours, theirs, self._nbytes, immediate,
                self._priority, write=self._write,
            )  # fmt: skip
            if at_once is not None:
                return at_once
        deadline = mover.deadline(timeout_s)
        if not self._write:
            if immediate is not None:
                raise ValueError("a read carries no immediate")
            return mover.read(
                self._peer, self._region, self._key, self._pieces, deadline, self._priority
            )
        return mover.write(
            self._peer,
            self._region,
            self._key,
            self._pieces,
            immediate,
            deadline,
            self._priority,
        )


def _check_post(immediate: int | None, timeout_s: float | None, *, write: bool) -> None:
    """Before anything is copied."""
    if immediate is not None:
        if not write:
            raise ValueError("a read carries no immediate")
        check_integer("an immediate, 32-bit unsigned,", immediate, 0, IMMEDIATE_MAX)
    if timeout_s is not None:
        check_timeout(timeout_s)
