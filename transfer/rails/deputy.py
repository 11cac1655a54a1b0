"""Tcp in place of RDMA, for as long as no RDMA rail leads to a peer.

    all RDMA rails are closed, and stay so for `GONE_S`
        what is left of each operation goes to the deputy, what is submitted later too
    one is open again
        what is new goes over RDMA; the deputy ends what it has

When a rail is closed the owner has said what arrived (see `transfer.backends.verbs.requester`):
what is handed over is in nobody's hands any more, so its immediate is counted once. Device memory
has no address that tcp could use, and waits for RDMA.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from transfer.errors import TransferError
from transfer.pieces import EMPTY, Pieces
from transfer.rails.requests import Requests
from transfer.rails.slices import Operation, Slice

logger = logging.getLogger(__name__)

# A rail that is opened again at once costs nothing but a moment.
GONE_S: Final = 0.3


class Replacement(Requests):
    """Requests over tcp that take over others' operations."""

    def take(self, operations: list[Operation]) -> None:
        """Take operations that are cut into slices; each keeps its deadline."""
        with self._lock:
            for operation in operations:
                self._core.add(operation)
                self._core.enqueue(operation)
            self._pump(time.monotonic())


class Replaceable(Requests):
    """Requests that others stand in for while no rail is open.

    Attributes:
        deputy: takes what is submitted, if there is one.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.deputy: Replacement | None = None

    @property
    def any_open(self) -> bool:
        """Whether a link stands over any rail, be it only to settle what it had."""
        return any(rail.is_open for rail in self._core.rails)

    def submit(self, operation: Operation, pieces: Pieces) -> None:
        """Take an operation, or have the deputy take it; as of `Requests`."""
        deputy = self.deputy if operation.movable else None
        if deputy is None:
            super().submit(operation, pieces)
        else:
            operation.handle.backend = "tcp"
            deputy.submit(operation, pieces)

    def hand_over(self) -> list[Operation]:
        """Give away what can go elsewhere and is on no rail."""
        core = self._core
        with self._lock:
            out = {part.operation for rail in core.rails for part in rail.out}
            given = [
                operation
                for operation in core.operations.values()
                if isinstance(operation, Operation) and operation.movable and operation not in out
            ]
            for operation in given:
                rest = _rest(operation)
                core.end(operation)
                _keep(operation, rest)
            self._call_waiting()
        return given


class Deputy:
    """Has tcp stand in for RDMA. On the engine's thread.

    Args:
        principal: the requests over RDMA.
        make: makes those over tcp.

    Attributes:
        requests: those over tcp; None until there was need.
    """

    def __init__(self, principal: Replaceable, make: Callable[[], Replacement]) -> None:
        self._principal = principal
        self._make = make
        self._gone_at: float | None = None
        self.requests: Replacement | None = None

    def tick(self, now: float) -> None:
        """Look whether it is needed. At every tick."""
        if self._principal.any_open:
            self._gone_at = self._principal.deputy = None
        else:
            self._gone_at = now if self._gone_at is None else self._gone_at
            if now - self._gone_at >= GONE_S:
                self._step_in()
        if self.requests is not None:
            self.requests.expire(now)

    def close(self, error: TransferError) -> None:
        """Fail what it has."""
        if self.requests is not None:
            self.requests.close(error)

    def abandon(self) -> None:
        """Close the descriptors only: the way out after a fork."""
        if self.requests is not None:
            self.requests.abandon()

    def _step_in(self) -> None:
        if self.requests is None:
            self.requests = self._make()
        if self._principal.deputy is None:
            logger.info("no RDMA rail is open: tcp takes over")
        self._principal.deputy = self.requests
        given = self._principal.hand_over()
        for operation in given:
            operation.handle.backend = "tcp"
            operation.handle.link = None
        self.requests.take(given)


def _rest(operation: Operation) -> list[Slice]:
    return [part for part in operation.slices if not part.done and part is not operation.signal]


def _keep(operation: Operation, rest: list[Slice]) -> None:
    """Make the rest all of an operation; where all is in place, its immediate is the rest."""
    operation.slices = rest or [Slice(operation, 0, EMPTY, 0)]
    operation.signal, operation.num_finished, operation.rails = None, 0, ()
    for idx, part in enumerate(operation.slices):
        part.idx, part.done, part.queued, part.avoid = idx, False, False, -1
