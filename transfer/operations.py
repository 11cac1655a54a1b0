"""Writes and reads: checked, then moved by the backend that the peer and the memory allow."""

from __future__ import annotations

import time

from transfer import native
from transfer.arguments import check_integer, check_timeout, check_type
from transfer.backends.local import LocalBackend
from transfer.backends.shared_memory import Window
from transfer.errors import AccessRefused, PeerLost, TransferError
from transfer.handle import Transfer
from transfer.immediates import IMMEDIATE_MAX, ImmediateBoard
from transfer.peer import PeerLink, PeerTable
from transfer.pieces import Ints, Pieces, copy_addressed, copy_pieces, out_of_bounds
from transfer.region import Access, Bytes, OfferTable, Region, RegionKey
from transfer.slices import Operation
from transfer.statistics import Tally
from transfer.wire import RequestKind

# As integers: an enum member's value costs more than the rest of the check.
READ, WRITE = Access.READ.value, Access.WRITE.value


class Mover:
    """Performs writes and reads. Thread-safe."""

    def __init__(
        self,
        name: str,
        table: PeerTable,
        offers: OfferTable,
        board: ImmediateBoard,
        tally: Tally,
    ) -> None:
        self._name = name
        self._table = table
        self._board = board
        self._tally = tally
        self._local = LocalBackend(name, offers)

    def write(
        self,
        peer: str,
        source: Region,
        target: RegionKey,
        pieces: Pieces,
        immediate: int | None,
        deadline: float,
    ) -> Transfer:
        """Move pieces of our region into the peer's window, then count the immediate there."""
        backend, link = self._route(peer, target)
        self._check(backend, target, WRITE, pieces.target_offsets, pieces)
        _check_own(pieces.source_offsets, pieces, source)
        if immediate is not None:
            check_integer("an immediate, 32-bit unsigned,", immediate, 0, IMMEDIATE_MAX)
        handle = Transfer(
            peer=peer, operation="write", backend=backend, nbytes=pieces.nbytes, deadline=deadline
        )
        self._tally.add(
            backend,
            operations=1,
            bytes_written=handle.nbytes,
            immediates=0 if immediate is None else 1,
        )
        if link is None:
            self._local.write(source, target, pieces)
            if immediate is not None:
                self._board.count(peer, [immediate])
        elif backend == "shared_memory":
            self._write_mapped(link, source, target, pieces, immediate, handle)
        else:
            self._submit(link, RequestKind.WRITE, source, target, pieces, immediate, handle)
            return handle
        handle.bytes_moved = handle.nbytes
        handle.finish()
        return handle

    def read(
        self, peer: str, target: Region, source: RegionKey, pieces: Pieces, deadline: float
    ) -> Transfer:
        """Move pieces of the peer's window into our region."""
        backend, link = self._route(peer, source)
        self._check(backend, source, READ, pieces.source_offsets, pieces)
        _check_own(pieces.target_offsets, pieces, target)
        handle = Transfer(
            peer=peer, operation="read", backend=backend, nbytes=pieces.nbytes, deadline=deadline
        )
        self._tally.add(backend, operations=1, bytes_read=handle.nbytes)
        if link is None:
            self._local.read(target, source, pieces)
        elif backend == "shared_memory":
            if len(pieces):
                window = link.windows.get(source, deadline)
                _copy(target.array, target.start, window.array, window.start, pieces)
        else:
            self._submit(link, RequestKind.READ, target, source, pieces, None, handle)
            return handle
        handle.bytes_moved = handle.nbytes
        handle.finish()
        return handle

    def _route(self, peer: str, key: RegionKey) -> tuple[str, PeerLink | None]:
        if type(key) is not RegionKey:
            check_type("a key", key, RegionKey)
        if key.owner != peer:
            raise ValueError(f"the key is {key.owner}'s, not {peer}'s")
        if peer == self._name:
            return "local", None
        link = self._table.ready(peer)
        mapped = link.backend == "shared_memory" and key.shareable
        return ("shared_memory" if mapped else "tcp"), link

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
            self._tally.add(backend, refused=1)
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
            _copy(window.array, window.start, source.array, source.start, pieces)
        if immediate is None:
            return
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
        self._tally.add(handle.backend, failures=1)
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
    ) -> None:
        if not handle.nbytes and immediate is None:
            handle.finish()
            return
        operation = Operation(
            kind=kind, handle=handle, token=key.token, region=region, immediate=immediate
        )
        link.requests.submit(operation, pieces)


def deadline_after(timeout_s: float | None, default_s: float) -> float:
    """Return the `time.monotonic` at which an operation that starts now is late."""
    return time.monotonic() + (default_s if timeout_s is None else check_timeout(timeout_s))


def _check_own(offsets: Ints, pieces: Pieces, region: Region) -> None:
    if type(region) is not Region:
        check_type("a region", region, Region)
    problem = out_of_bounds(offsets, pieces.lengths, region.nbytes)
    if problem is not None:
        raise ValueError(f"own region: {problem}")


def _copy(
    target: Bytes,
    target_start: int,
    source: Bytes,
    source_start: int,
    pieces: Pieces,
) -> None:
    if native.COMPILED or len(pieces) == 1:
        copy_addressed(target_start, source_start, pieces)
    else:
        copy_pieces(target, source, pieces)
