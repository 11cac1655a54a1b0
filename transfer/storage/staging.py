"""Writes and reads where one side is a storage: a file, a GPU.

    ours          theirs (or our own)   how
    host          own storage           the storage moves it, without a copy where it can
    own storage   own storage           through a bounce buffer; GPUs that reach one another do not
    own storage   peer's host memory    through a bounce buffer, then over the peer's rails
    any           peer's storage        the owner moves it between its storage and our buffer
    shared host   peer's file, written  on one host the owner takes it from where it lies
    any           GPU of this host      through CUDA IPC, without the owner, where it can be opened

Everything here is asynchronous: the call returns at once, threads of the storage or of this
module do the work. They are started by the first operation that needs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import torch

from transfer.backends.cuda_ipc import CudaWindows
from transfer.backends.cuda_memory import CudaDevices, CudaMemory
from transfer.backends.local import LocalBackend
from transfer.errors import EngineClosed, TransferError
from transfer.handle import Transfer
from transfer.immediates import ImmediateBoard
from transfer.memory.memory import Memory
from transfer.memory.region import Access, Bytes, OfferTable, Region, RegionKey
from transfer.peer import PeerLink, PeerTable
from transfer.pieces import EMPTY, CopyPieces, Pieces
from transfer.priority import Priority
from transfer.rails.slices import cut
from transfer.storage.asking import Asking, PeerStorageEnd
from transfer.storage.batch_queue import BatchQueue, SharedWork, Work
from transfer.storage.bounce import (
    BUFFER_BYTES,
    Bounces,
    End,
    PeerEnd,
    PeerMoves,
    StagedWork,
    StorageEnd,
    near_end,
)
from transfer.storage.messages import PIECES_MAX, AskKind
from transfer.storage.opened_work import OpenedWork
from transfer.storage.read_ahead import ReadAhead
from transfer.storage.service import StorageService
from transfer.storage.source_keys import SourceKeys
from transfer.storage.storage import Done, Storage, StorageRegion, make_region
from transfer.storage.unstaged import UnstagedWrites
from transfer.wire import ControlKind, encode_control

THREADS: Final = 4
SERVING_THREADS: Final = 4  # as many as a requester has: else its threads wait for one another
QUEUED_MAX: Final = 256
BOTH: Final = Access.READ | Access.WRITE


class Staging:
    """Moves what has no address. Thread-safe.

    Own transfers and the asks of peers have threads of their own: were they the same, two
    engines that ask each other could wait for each other's threads for ever.
    """

    def __init__(
        self,
        name: str,
        table: PeerTable,
        offers: OfferTable,
        board: ImmediateBoard,
        moves: PeerMoves,
    ) -> None:
        self._name = name
        self._table = table
        self._board = board
        self._moves = moves
        self._local = LocalBackend(name, offers)
        self._lock = threading.Lock()
        self._closed = False
        self._own: BatchQueue | None = None
        self._served: BatchQueue | None = None
        self._bounces = Bounces(offers)
        self._open: set[Transfer] = set()
        self.stir: Callable[[], None] = lambda: None
        self.devices = CudaDevices()
        self._windows = CudaWindows(self.devices)
        self._asking = Asking(table)
        self._service = StorageService(
            offers,
            board,
            moves,
            Bounces(offers),
            self._serving_queue,
            self._mapped_buffer,
            self._map_buffer,
        )
        self._source_keys = SourceKeys(offers, self._tell_withdrawn)
        self._unstaged = UnstagedWrites(self._asking, self._source_keys, self._own_queue, table)

    def register(self, memory: Memory | torch.Tensor | Storage) -> Region:
        """As `TransferEngine.register`."""
        if isinstance(memory, torch.Tensor) and memory.device.type == "cuda":
            return StorageRegion(self.devices.memory_of(memory))
        return make_region(memory)

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
        """As `Mover.write`, where the source or the target is a storage. Checked already."""
        handle = _handle(peer, "write", source, target, pieces, deadline)
        if peer == self._name:
            offer = self._local.find(target, Access.WRITE, pieces.target_offsets, pieces.lengths)

            def count() -> None:
                if immediate is not None:
                    self._board.count(peer, [immediate])

            moved = self._track(handle, count)
            shifted = _shift(pieces, 0, offer.offset)
            self.move(source, offer.region, shifted, "write", deadline, moved)
            return handle

        def signal() -> None:
            if immediate is not None:
                self._signal(peer, target, immediate, deadline, priority)

        moved = self._track(handle, signal)
        if not self._unstaged.begin(
            source, target, pieces, deadline, moved, then_waits=immediate is not None
        ):
            self._reach(source, target, pieces, priority, moved, write=True, deadline=deadline)
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
        """As `Mover.read`, where the source or the target is a storage. Checked already."""
        handle = _handle(peer, "read", target, source, pieces, deadline)
        if peer == self._name:
            offer = self._local.find(source, Access.READ, pieces.source_offsets, pieces.lengths)
            moved = self._track(handle, _nothing)
            shifted = _shift(pieces, offer.offset, 0)
            self.move(offer.region, target, shifted, "read", deadline, moved)
            return handle
        moved = self._track(handle, _nothing)
        self._reach(
            target, source, pieces, priority, moved, write=False, deadline=deadline, copy=copy
        )
        return handle

    def on_frame(self, link: PeerLink, kind: ControlKind, content: bytes) -> None:
        """Take a peer's ask, or its answer. On the engine's thread; never waits.

        Raises:
            ProtocolViolation: the bytes make no sense.
        """
        if kind is ControlKind.STORAGE_ASK:
            self._service.on_ask(link, content)
        else:
            self._asking.on_answer(link.name, content)

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is under way."""
        return bool(self._open)

    def expire(self, now: float) -> None:
        """Fail transfers that are beyond their deadlines, even if a disk hangs. At every tick."""
        self._source_keys.drop_gone()
        for handle in [handle for handle in list(self._open) if handle.deadline <= now]:
            self._open.discard(handle)
            handle.finish(handle.timed_out())
        self._asking.expire(now)

    def forget(self, peer: str, error: TransferError) -> None:
        """Free what a lost peer could access, and what was open of it."""
        self._asking.forget(peer, error)
        self._bounces.forget(peer)
        self._source_keys.forget(peer)
        self._windows.forget(peer)

    def drop(self, peer: str, token: bytes) -> None:
        """Forget a key that a peer has withdrawn."""
        self._windows.drop(peer, token)

    def withdrawn(self, token: bytes, timeout_s: float) -> bool:
        """Wait until what a peer was doing under a withdrawn key has ended; False if it has not."""
        return self._service.quiesce(token, timeout_s)

    def abandon(self) -> None:
        """Fail what is under way: the way out after a fork."""
        for handle in list(self._open):
            handle.abandon()

    def close(self) -> None:
        """Fail what waits, wait for what moves, free threads and buffers; idempotent."""
        with self._lock:
            self._closed = True
            queues = [queue for queue in (self._own, self._served) if queue is not None]
        self._asking.close()
        ended = [queue.close() for queue in queues]
        if all(ended):
            self._bounces.close()
            self._service.bounces.close()
        self._windows.close()
        self.devices.close()

    def _track(self, handle: Transfer, then: Callable[[], None]) -> Done:
        """Return what ends `handle`: `then`, if its bytes are in place, and the news."""
        self._open.add(handle)
        self.stir()

        def moved(error: TransferError | None) -> None:
            self._open.discard(handle)
            if error is None:
                handle.bytes_moved = handle.nbytes
                try:
                    then()
                except TransferError as caught:
                    error = caught
            handle.finish(error)

        return moved

    def move(
        self,
        source: Region,
        target: Region,
        pieces: Pieces,
        operation: str,
        deadline: float,
        done: Done,
    ) -> None:
        """Move within this process; offsets count from the regions."""
        if isinstance(source, StorageRegion) and isinstance(target, StorageRegion):
            ours, theirs = source.storage, target.storage
            if isinstance(ours, CudaMemory) and ours.reaches(theirs):
                ours.move_to(theirs, pieces, deadline, done)
                return
            work = self.staged(StorageEnd(ours), StorageEnd(theirs), pieces, deadline)
            self._own_queue().submit(work, operation, deadline, done)
        elif isinstance(source, StorageRegion):
            source.storage.fetch(target.array, pieces, deadline, done)
        else:
            assert isinstance(target, StorageRegion)
            target.storage.store(source.array, pieces, deadline, done)

    def staged(
        self, source: End, target: End, pieces: Pieces, deadline: float, peer: str = ""
    ) -> StagedWork:
        """Return the work of moving pieces from one end to the other, through buffers."""
        return StagedWork(
            self._bounces, source, target, _steps(pieces), peer=peer, deadline=deadline
        )

    def _reach(
        self,
        own: Region,
        key: RegionKey,
        pieces: Pieces,
        priority: Priority | None,
        done: Done,
        *,
        write: bool,
        deadline: float,
        copy: CopyPieces | None = None,
    ) -> None:
        """Move between a region of ours and a peer's window."""
        same_host = self._table.ready(key.owner).backend == "shared_memory"
        ends = near_end(own, copy), self._far_end(key.owner, key, priority)
        source, target = ends if write else ends[::-1]
        peer = "" if key.kind == "host" else key.owner
        staged = self.staged(source, target, pieces, deadline, peer)
        work: Work | SharedWork = staged
        if key.kind == "file" and not write:
            work = ReadAhead(self._bounces, self._asking, key, target, _steps(pieces), deadline)
        elif same_host and key.kind.startswith("cuda") and Access(key.rights) == BOTH:
            work = OpenedWork(self, own, key, pieces, staged, write=write, deadline=deadline)
        self._own_queue().submit(work, "write" if write else "read", deadline, done)

    def open_window(self, key: RegionKey, deadline: float) -> StorageRegion:
        """Open a peer's device memory here; waits.

        Raises:
            DeviceUnavailable, StorageFailed, AccessRefused: it is not to be had here.
        """
        memory = self._windows.get(
            key.owner,
            key.token,
            key.nbytes,
            lambda: self._asking.ask(AskKind.PLACE, key, deadline),
        )
        return StorageRegion(memory)

    def _map_buffer(self, peer: str, key: RegionKey, deadline: float) -> Bytes | None:
        link = self._table.ready(peer)
        if link.backend != "shared_memory" or not key.shareable:
            return None
        return link.windows.get(key, deadline).array

    def _mapped_buffer(self, peer: str, key: RegionKey) -> Bytes | None:
        link = self._table.get(peer)
        window = None if link is None else link.windows.find(key)
        return None if window is None else window.array

    def _tell_withdrawn(self, token: bytes, peer: str) -> None:
        link = self._table.get(peer)
        if link is not None:
            link.control.send(encode_control(ControlKind.WITHDRAWN, token))

    def _far_end(self, peer: str, key: RegionKey, priority: Priority | None) -> End:
        self._table.ready(peer)
        if key.kind != "host":
            return PeerStorageEnd(self._asking, key)
        return PeerEnd(self._moves, peer, key, priority)

    def _signal(
        self,
        peer: str,
        target: RegionKey,
        immediate: int,
        deadline: float,
        priority: Priority | None,
    ) -> None:
        if target.kind != "host":
            self._asking.ask(AskKind.SIGNAL, target, deadline, immediate=immediate)
            return
        nothing = Region(torch.zeros(1, dtype=torch.uint8))
        self._moves.write(peer, nothing, target, EMPTY, immediate, deadline, priority).wait()

    def _own_queue(self) -> BatchQueue:
        with self._lock:
            self._own = self._own or self._start(f"transfers of {self._name}", THREADS)
            return self._own

    def _serving_queue(self) -> BatchQueue:
        with self._lock:
            name = f"storages of {self._name}"
            self._served = self._served or self._start(name, SERVING_THREADS, hurries=True)
            return self._served

    def _start(self, name: str, threads: int, *, hurries: bool = False) -> BatchQueue:
        if self._closed:
            raise _closed(name, "")
        queue = BatchQueue(
            name, backend="staging", threads=threads, queued_max=QUEUED_MAX,
            turn_bytes=BUFFER_BYTES, closed=_closed, hurries=hurries,
        )  # fmt: skip
        queue.open()
        return queue


def _closed(name: str, operation: str) -> EngineClosed:
    return EngineClosed("the transfer engine was closed")


def _nothing() -> None:
    """What follows a read."""


def _steps(pieces: Pieces) -> list[Pieces]:
    return cut(pieces, slice_bytes=BUFFER_BYTES, slice_pieces=PIECES_MAX)


def _shift(pieces: Pieces, source: int, target: int) -> Pieces:
    return Pieces(pieces.source_offsets + source, pieces.target_offsets + target, pieces.lengths)


def _handle(
    peer: str, operation: str, own: Region, key: RegionKey, pieces: Pieces, deadline: float
) -> Transfer:
    kind = own.kind if own.kind != "host" else key.kind
    return Transfer(
        peer=peer,
        operation=operation,
        backend=kind.partition(":")[0],
        nbytes=pieces.nbytes,
        deadline=deadline,
    )
