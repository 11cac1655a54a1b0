"""Writes and reads: checked, then moved by the backend that the peer and the memory allow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from transfer import native
from transfer.arguments import check_integer, check_timeout, check_type
from transfer.backends.local import LocalBackend
from transfer.backends.process_memory import Location
from transfer.backends.shared_memory import Window
from transfer.errors import AccessRefused, PeerLost, TransferError
from transfer.handle import Transfer
from transfer.immediates import IMMEDIATE_MAX, ImmediateBoard
from transfer.memory.region import Access, OfferTable, Region, RegionKey
from transfer.peer import PeerLink, PeerTable
from transfer.pieces import CopyPieces, Ints, Pieces, copy_between, out_of_bounds
from transfer.prepared import InPlace
from transfer.priority import Priority, class_of
from transfer.rails.slices import Operation
from transfer.statistics import Tally
from transfer.wire import RequestKind

if TYPE_CHECKING:
    from transfer.storage.staging import Staging

# As integers: an enum member's value costs more than the rest of the check.
READ, WRITE = Access.READ.value, Access.WRITE.value
PRIORITIES = (type(None), Priority)


class Mover:
    """Performs writes and reads. Thread-safe.

    Attributes:
        staging: moves what has no address; set by the engine.
        post_short: sends one piece over sockets in this thread, or copies it into or out of mapped
            memory; None if it has to go another way.
    """

    staging: Staging

    def __init__(
        self,
        name: str,
        table: PeerTable,
        offers: OfferTable,
        board: ImmediateBoard,
        tally: Tally,
        timeout_s: float,
    ) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._table = table
        table.short_way.timeout_s = timeout_s
        self.post_short = table.short_way.post
        self._board = board
        self.tally = tally
        self._local = LocalBackend(name, offers)

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
        """Move pieces of our region into the peer's window, then count the immediate there."""
        backend, link = self._route(peer, target)
        self._check(backend, target, WRITE, pieces.target_offsets, pieces)
        _check_own(pieces.source_offsets, pieces, source)
        if immediate is not None:
            check_integer("an immediate, 32-bit unsigned,", immediate, 0, IMMEDIATE_MAX)
        if self._is_staged(link, source, target, deadline):
            # Between a storage of ours and a peer, what moves the buffers counts their bytes.
            if link is None:
                kind = class_of(priority, pieces.nbytes, immediate, write=True)
                self.tally.wrote(backend, pieces.nbytes, immediate is not None, kind)
            return self.staging.write(peer, source, target, pieces, immediate, deadline, priority)
        backend, location = self._locate(backend, link, target, pieces, deadline)
        handle = Transfer(
            peer=peer, operation="write", backend=backend, nbytes=pieces.nbytes, deadline=deadline
        )
        kind = class_of(priority, handle.nbytes, immediate, write=True)
        self.tally.wrote(backend, handle.nbytes, immediate is not None, kind)
        if link is None:
            self._local.write(source, target, pieces)
            if immediate is not None:
                self._board.count(peer, [immediate])
        elif backend == "shared_memory":
            self._write_mapped(link, source, target, pieces, immediate, handle)
        elif location is not None and link.locations.write(target, location, source, pieces):
            if immediate is not None:
                self._signal(link, immediate, handle)
        else:
            handle.backend = "verbs" if link.backend == "verbs" else "tcp"
            self._submit(link, RequestKind.WRITE, source, target, pieces, immediate, handle, kind)
            return handle
        handle.bytes_moved = handle.nbytes
        handle.finish()
        return handle

    def write_with_note(
        self,
        peer: str,
        source: Region,
        target: RegionKey,
        pieces: Pieces,
        note: bytes,
        deadline: float,
        priority: Priority | None,
    ) -> Transfer | None:
        """As `write`, over tcp with a note; None if it would go another way."""
        backend, link = self._route(peer, target)
        self._check(backend, target, WRITE, pieces.target_offsets, pieces)
        _check_own(pieces.source_offsets, pieces, source)
        kind = class_of(priority, pieces.nbytes, None, write=True)
        if link is None or backend != "tcp" or not source.kind == target.kind == "host":
            return None
        handle = Transfer(
            peer=peer, operation="write", backend=backend, nbytes=pieces.nbytes, deadline=deadline
        )
        self.tally.wrote(backend, handle.nbytes, False, kind)
        self._submit(link, RequestKind.WRITE, source, target, pieces, None, handle, kind, note)
        return handle

    def read(
        self,
        peer: str,
        target: Region,
        source: RegionKey,
        pieces: Pieces,
        deadline: float,
        priority: Priority | None = None,
        copy: CopyPieces | None = None,
    ) -> Transfer:
        """Move pieces of the peer's window into our region; `copy` as of `Movement.read`."""
        backend, link = self._route(peer, source)
        self._check(backend, source, READ, pieces.source_offsets, pieces)
        _check_own(pieces.target_offsets, pieces, target, lands=True)
        if self._is_staged(link, target, source, deadline):
            if link is None:
                kind = class_of(priority, pieces.nbytes, None, write=False)
                self.tally.read(backend, pieces.nbytes, kind)
            return self.staging.read(peer, target, source, pieces, deadline, priority, copy)
        backend, location = self._locate(backend, link, source, pieces, deadline)
        handle = Transfer(
            peer=peer, operation="read", backend=backend, nbytes=pieces.nbytes, deadline=deadline
        )
        kind = class_of(priority, handle.nbytes, None, write=False)
        self.tally.read(backend, handle.nbytes, kind)
        if link is None:
            self._local.read(target, source, pieces)
        elif backend == "shared_memory":
            if len(pieces):
                window = link.windows.get(source, deadline)
                copy_between(target.array, target.start, window.array, window.start, pieces)
        elif location is None or not link.locations.read(source, location, target, pieces):
            handle.backend = "verbs" if link.backend == "verbs" else "tcp"
            self._submit(link, RequestKind.READ, target, source, pieces, None, handle, kind)
            return handle
        handle.bytes_moved = handle.nbytes
        handle.finish()
        return handle

    def move_at_once(
        self,
        peer: str,
        region: Region,
        key: RegionKey,
        our_offset: object,
        their_offset: object,
        nbytes: int,
        immediate: int | None,
        priority: Priority | None,
        *,
        write: bool,
    ) -> Transfer | None:
        """Copy one piece where the memory is mapped already; None if it is not.

        Without the compiled part, and with an immediate: else `post_short` has done so. Whatever
        is unusual or wrong is left to `write` and `read`, which say what.
        """
        link = self._table.get(peer)
        if (
            link is None
            or not link.alive
            or type(our_offset) is not int
            or type(their_offset) is not int
            or type(key) is not RegionKey
            or type(region) is not Region
            or region.kind != "host"
        ):
            return None
        window = link.windows.find(key)
        if (
            window is None
            or key.owner != peer
            or not key.rights & (WRITE if write else READ)
            or not 0 <= their_offset <= their_offset + nbytes <= key.nbytes
            or not 0 <= our_offset <= our_offset + nbytes <= region.nbytes
            or nbytes <= 0
            or type(priority) not in PRIORITIES
        ):
            return None
        if immediate is not None:
            check_integer("an immediate, 32-bit unsigned,", immediate, 0, IMMEDIATE_MAX)
        ours, theirs = region.start + our_offset, window.start + their_offset
        if write:
            native.copy_one(theirs, ours, nbytes)
        else:
            native.copy_one(ours, theirs, nbytes)
        return self.account(link, nbytes, immediate, priority, write=write)

    def prepare(
        self, peer: str, region: Region, key: RegionKey, pieces: Pieces, *, write: bool
    ) -> tuple[PeerLink | None, Window | None]:
        """Check what does not change between posts.

        Returns:
            The link, and the window if the peer's memory is mapped and there is something to
            move: then copying and `account` are all there is to do.
        """
        backend, link = self._route(peer, key)
        ours, theirs = pieces.source_offsets, pieces.target_offsets
        if not write:
            ours, theirs = theirs, ours
        self._check(backend, key, WRITE if write else READ, theirs, pieces)
        _check_own(ours, pieces, region, lands=not write)
        if link is None or backend != "shared_memory" or not len(pieces) or region.kind != "host":
            return link, None
        return link, link.windows.get(key, self.deadline(None))

    def in_place(self, peer: str, key: RegionKey) -> InPlace | None:
        """Return the memory of a key that is mapped already and may be written."""
        link = self._table.get(peer)
        if link is None or not link.alive or key.owner != peer or not key.rights & WRITE:
            return None
        window = link.windows.find(key)
        return None if window is None or not window.live else InPlace(self, link, window)

    def account(
        self,
        link: PeerLink,
        nbytes: int,
        immediate: int | None,
        priority: Priority | None,
        *,
        write: bool,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Count a copy that was made between mapped memories, and signal its immediate."""
        handle = Transfer.of_copy(link.name, "write" if write else "read", nbytes)
        kind = class_of(priority, nbytes, immediate, write=write)
        if not write:
            if immediate is not None:
                raise ValueError("a read carries no immediate")
            self.tally.read("shared_memory", nbytes, kind)
            return handle
        self.tally.wrote("shared_memory", nbytes, immediate is not None, kind)
        if immediate is not None:
            handle.deadline = self.deadline(timeout_s)
            self._signal(link, immediate, handle)
        return handle

    def deadline(self, timeout_s: float | None) -> float:
        """Return when an operation that starts now is late."""
        return deadline_after(timeout_s, self._timeout_s)

    def _is_staged(
        self, link: PeerLink | None, region: Region, key: RegionKey, deadline: float
    ) -> bool:
        """Whether memory without an address is involved that no network card reaches."""
        if region.kind == key.kind == "host":
            return False
        rdma = link.rdma if link is not None and link.backend == "verbs" else None
        return rdma is None or not rdma.reaches(region, key, deadline)

    def _route(self, peer: str, key: RegionKey) -> tuple[str, PeerLink | None]:
        if type(key) is not RegionKey:
            check_type("a key", key, RegionKey)
        if key.owner != peer:
            raise ValueError(f"the key is {key.owner}'s, not {peer}'s")
        if peer == self._name:
            return "local", None
        link = self._table.ready(peer)
        if link.backend != "shared_memory":
            return link.backend, link
        return ("shared_memory" if key.shareable else "process_memory"), link

    def _locate(
        self,
        backend: str,
        link: PeerLink | None,
        key: RegionKey,
        pieces: Pieces,
        deadline: float,
    ) -> tuple[str, Location | None]:
        """Find where memory that is not mapped lies; by sockets where we may not reach it."""
        if link is None or backend != "process_memory":
            return backend, None
        location = link.locations.get(key, deadline) if len(pieces) else None
        return ("tcp" if location is None else backend), location

    def _check(
        self,
        backend: str,
        key: RegionKey,
        needed: int,
        offsets: Ints,
        pieces: Pieces,
    ) -> None:
        problem = out_of_bounds(offsets, pieces.lengths, key.nbytes)
        if not key.rights & needed:
            problem = f"the key does not give the right to {Access(needed).name}"
        if problem is not None:
            self.tally.add(backend, refused=1)
            raise AccessRefused(key.owner, problem)

    def _write_mapped(
        self,
        link: PeerLink,
        source: Region,
        target: RegionKey,
        pieces: Pieces,
        immediate: int | None,
        handle: Transfer,
    ) -> None:
        if len(pieces):
            window: Window = link.windows.get(target, handle.deadline)
            copy_between(window.array, window.start, source.array, source.start, pieces)
        if immediate is not None:
            self._signal(link, immediate, handle)

    def _signal(self, link: PeerLink, immediate: int, handle: Transfer) -> None:
        assert link.signal is not None, "a ready same-host link has its signal channel"
        try:
            sent = link.signal.send(immediate, handle.deadline)
        except OSError as error:
            evidence = link.evidence or f"signal connection broke: {error.strerror or error}"
            raise self._failed(handle, PeerLost(
                link.name, evidence, backend=handle.backend, attempts=1,
                bytes_moved=handle.nbytes, elapsed_s=handle.elapsed_s,
            )) from error  # fmt: skip
        if not sent:
            handle.bytes_moved = handle.nbytes
            raise self._failed(handle, handle.timed_out())

    def _failed(self, handle: Transfer, error: TransferError) -> TransferError:
        self.tally.add(handle.backend, failures=1)
        return error

    def _submit(
        self,
        link: PeerLink,
        kind: RequestKind,
        region: Region,
        key: RegionKey,
        pieces: Pieces,
        immediate: int | None,
        handle: Transfer,
        priority: Priority,
        note: bytes = b"",
    ) -> None:
        if not handle.nbytes and immediate is None and not note:
            handle.finish()
            return
        if link.backend == "verbs" and link.rdma is not None and handle.nbytes:
            link.rdma.register(region)
        operation = Operation(
            kind=kind,
            handle=handle,
            token=key.token,
            region=region,
            immediate=immediate,
            note=note,
            priority=priority,
            movable=region.kind == key.kind == "host",
        )
        link.requests.submit(operation, pieces)


def deadline_after(timeout_s: float | None, default_s: float) -> float:
    """Return the `time.monotonic` at which an operation that starts now is late."""
    return time.monotonic() + (default_s if timeout_s is None else check_timeout(timeout_s))


def _check_own(offsets: Ints, pieces: Pieces, region: Region, *, lands: bool = False) -> None:
    if type(region) is not Region and not check_type("a region", region, Region).writable and lands:
        raise ValueError("own region: it is mapped read-only, nothing can be read into it")
    problem = out_of_bounds(offsets, pieces.lengths, region.nbytes)
    if problem is not None:
        raise ValueError(f"own region: {problem}")
