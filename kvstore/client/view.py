"""Bytes of the pool that are read where they lie: leased, verified, kept there until the end.

    open ─▶ lease renewed in the background ─▶ checksum ─▶ read-only memory, handed out
    end  ─▶ was it leased all the time? else LeaseLost ─▶ the memory is let go, the lease too

What is handed out is memory that the node shares. It stays mapped for as long as anything is made
of it, whatever becomes of the node, the engine and the store: it may hold other bytes one day, but
can always be read. So a view tells, at its end, whether the bytes were the right ones until then:

lease runs          nobody else got their place since they were verified: nothing need be read
nobody was asked    the master is away, or a new one does not know the lease: they are summed again
its time is over    this process stood still, or the view was open for too long: LeaseLost
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

from kvstore.client.lease import Lease
from kvstore.errors import LeaseLost, StoreClosed

if TYPE_CHECKING:
    from types import TracebackType

    from kvstore.client.lease_keeper import LeaseKeeper


class View:
    """What views of one value and of many blocks share. To be used in a `with` statement.

    Anything made of its memory (a numpy array, a tensor, a slice) may outlive it: then its lease is
    kept until that is gone too, for the longest time of the view at most. `check` tells afterwards
    too. One thread may close it; all else is thread-safe.

    Args:
        lease: Of the bytes; None if they were copied into memory of this process.
        keeper: Renews it.
        seen: Lives as long as anything that was made of the memory; nobody else has it.
    """

    __slots__ = ("_keeper", "_lease", "_open", "_seen")

    def __init__(self, lease: Lease | None, keeper: LeaseKeeper, seen: object) -> None:
        self._lease = lease
        self._keeper = keeper
        self._seen: object = seen
        self._open = [True]

    @property
    def in_place(self) -> bool:
        """Whether the bytes are read where they lie in the pool; else they were copied."""
        return self._lease is not None

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._open

    def held(self) -> bool:
        """Tell whether the bytes are kept in place for certain; of a copy always.

        False is no proof that they have changed: `check` looks further.
        """
        lease = self._lease
        return lease is None or (not lease.lost and lease.late_s() < 0)

    def check(self) -> None:
        """Make sure that the bytes were the right ones since they were verified.

        Raises:
            LeaseLost: They may not have been.
        """
        lease = self._lease
        if lease is None or (lease.late_s() < 0 and not lease.lost):
            return
        late_s = lease.late_s()
        if late_s >= 0 and not lease.adrift:
            why = "is not renewed any more" if lease.lost else "was not renewed in time"
            raise LeaseLost(lease_id=lease.lease_id, problem=f"{why}, and ended {late_s:.3g} s ago")
        if not self.lies_right():
            raise LeaseLost(lease_id=lease.lease_id, problem="was lost, and other bytes are there")

    def lies_right(self) -> bool:
        """Sum the bytes up again, and tell whether they are the right ones now."""
        raise NotImplementedError

    def close(self) -> None:
        """Let the bytes go without a check. Idempotent."""
        try:
            self._open.pop()
        except IndexError:
            return
        self._let_go()
        lease = self._lease
        if lease is None:
            return
        # CPython counts: this object's reference, and that of the call. More are of what was made
        # of the memory; the keeper drops the lease when they are gone.
        if sys.getrefcount(self._seen) == 2:
            self._keeper.let(lease)
            self._seen = None
            self._give_back(lease)
        self._seen = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._open:
                self.check()
        finally:
            self.close()

    def _let_go(self) -> None:
        """Forget the memory that was handed out."""
        raise NotImplementedError

    def _give_back(self, lease: Lease) -> None:
        self._keeper.drop(lease)

    def _check_open(self) -> None:
        if not self._open:
            raise StoreClosed(what=type(self).__name__)


def release_all(memories: Iterable[memoryview]) -> None:
    """Make memory unusable that nothing was made of; the rest stays as it is."""
    for memory in memories:
        with contextlib.suppress(BufferError):
            memory.release()
