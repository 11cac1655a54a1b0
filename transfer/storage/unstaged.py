"""Writes to a peer's file that its disk takes from where they lie in our memory: no buffer.

What one ask can tell is asked for by the caller, and the engine's thread ends the transfer when the
answer is there. More than that, and an owner that is busy, has threads that ask and wait.
"""

from __future__ import annotations

from collections.abc import Callable

from transfer.errors import TransferError
from transfer.memory.region import Region, RegionKey
from transfer.peer import PeerTable
from transfer.pieces import Pieces
from transfer.rails.slices import cut
from transfer.storage.asking import Asking
from transfer.storage.batch_queue import BatchQueue
from transfer.storage.messages import ASK_BYTES_MAX, PIECES_MAX, AskKind
from transfer.storage.source_keys import SourceKeys
from transfer.storage.storage import Done


class UnstagedWrites:
    """Thread-safe.

    Args:
        asking: asks the owner.
        keys: to our memory, for the owner.
        queue: whose threads wait.
        table: the peers.
    """

    def __init__(
        self,
        asking: Asking,
        keys: SourceKeys,
        queue: Callable[[], BatchQueue],
        table: PeerTable,
    ) -> None:
        self._asking = asking
        self._keys = keys
        self._queue = queue
        self._table = table

    def begin(
        self,
        own: Region,
        target: RegionKey,
        pieces: Pieces,
        deadline: float,
        done: Done,
        *,
        then_waits: bool,
    ) -> bool:
        """Begin to write host memory to a file of a peer on this host.

        Args:
            own: what is to be written.
            target: where to, at a peer.
            pieces: from the one to the other.
            deadline: `time.monotonic` of all.
            done: gets None, or the first error.
            then_waits: whether `done` may wait for the peer; then a thread of the queue calls it.

        Returns:
            False if it is something else, or the owner cannot map it: nothing is begun.

        Raises:
            TransferError: nothing is begun, `done` is not called.
        """
        same_host = self._table.ready(target.owner).backend == "shared_memory"
        if not same_host or target.kind != "file" or own.kind != "host":
            return False
        source = self._keys.get(own, target.owner)
        if source is None:
            return False
        single = pieces.nbytes <= ASK_BYTES_MAX and 0 < len(pieces) <= PIECES_MAX
        if then_waits or not single or not self._ask(target, source, pieces, deadline, done):
            steps = cut(pieces, slice_bytes=ASK_BYTES_MAX, slice_pieces=PIECES_MAX)
            work = _Asks(self._asking, target, source, steps, deadline)
            self._queue().submit(work, "write", deadline, done)
        return True

    def _ask(
        self, target: RegionKey, source: RegionKey, pieces: Pieces, deadline: float, done: Done
    ) -> bool:
        def then(error: TransferError | None, busy: bool) -> None:
            if not busy:
                done(error)
                return
            again = _Asks(self._asking, target, source, [pieces], deadline)
            try:
                self._queue().submit(again, "write", deadline, done, wait=False)
            except TransferError as refused:
                done(refused)

        return self._asking.ask_to_write(target, source, pieces, deadline, then)


class _Asks:
    """Work of a `BatchQueue`: threads that ask and wait, several asks for what is much.

    Args:
        asking: asks the owner.
        target: of its window.
        source: opens our memory to the owner.
        steps: what is asked for at a time.
        deadline: of all.
    """

    def __init__(
        self,
        asking: Asking,
        target: RegionKey,
        source: RegionKey,
        steps: list[Pieces],
        deadline: float,
    ) -> None:
        self._asking = asking
        self._target = target
        self._source = source
        self._steps = steps
        self._deadline = deadline

    def __len__(self) -> int:
        return len(self._steps)

    def weigh(self, index: int) -> int:
        """Bytes of a step."""
        return self._steps[index].nbytes

    def perform(self, index: int, lane: int) -> None:
        """Ask, and wait for the answer."""
        step = self._steps[index]
        self._asking.ask(
            AskKind.WRITE,
            self._target,
            self._deadline,
            buffer=self._source,
            offsets=step.target_offsets,
            lengths=step.lengths,
            places=step.source_offsets,
        )
