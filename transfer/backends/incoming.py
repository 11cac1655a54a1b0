"""Which slices of a peer's writes are in place. Makes sending a slice twice harmless. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from transfer.errors import ProtocolViolation
from transfer.wire import TRANSFERS_AHEAD_MAX, Request

OPEN_WRITES_MAX: Final = 4096


@dataclass(slots=True)
class _OpenWrite:
    num_slices: int
    arrived: set[int] = field(default_factory=set)
    receiving: dict[int, object] = field(default_factory=dict)


class IncomingWrites:
    """The writes of one life of a peer.

    A slice that comes again over another connection takes over from the first: of two
    receivers of one slice only the latest may write.
    """

    def __init__(self) -> None:
        self._open: dict[int, _OpenWrite] = {}
        self._finished: set[int] = set()
        self._oldest = 0

    def begin(self, request: Request, receiver: object) -> bool:
        """Say whether this slice is to be written by `receiver`; False if it is in place.

        Raises:
            ProtocolViolation: what no engine does.
        """
        self._forget_below(request.oldest)
        transfer_id = request.transfer_id
        if transfer_id >= self._oldest + TRANSFERS_AHEAD_MAX:
            raise ProtocolViolation("a transfer too far ahead of the oldest")
        if transfer_id < self._oldest or transfer_id in self._finished:
            return False
        write = self._open.setdefault(transfer_id, _OpenWrite(request.num_slices))
        if len(self._open) > OPEN_WRITES_MAX:
            raise ProtocolViolation(f"more than {OPEN_WRITES_MAX} open writes")
        if write.num_slices != request.num_slices:
            raise ProtocolViolation("slices of one write differ in their number")
        if request.slice_idx in write.arrived:
            return False
        write.receiving[request.slice_idx] = receiver
        return True

    def is_receiver(self, request: Request, receiver: object) -> bool:
        """Whether `receiver` may still write this slice."""
        write = self._open.get(request.transfer_id)
        return write is not None and write.receiving.get(request.slice_idx) is receiver

    def is_in_place(self, request: Request) -> bool:
        """Whether a slice is in place, or its write is given up."""
        if request.transfer_id < self._oldest or request.transfer_id in self._finished:
            return True
        write = self._open.get(request.transfer_id)
        return write is not None and request.slice_idx in write.arrived

    def finish(self, request: Request, receiver: object) -> bool:
        """Note that a slice is in place; True exactly once, when it completes its write."""
        if not self.is_receiver(request, receiver):
            return False
        write = self._open[request.transfer_id]
        del write.receiving[request.slice_idx]
        write.arrived.add(request.slice_idx)
        if len(write.arrived) < request.num_slices:
            return False
        del self._open[request.transfer_id]
        self._finished.add(request.transfer_id)
        return True

    def _forget_below(self, oldest: int) -> None:
        if oldest > self._oldest:
            self._oldest = oldest
            self._open = {k: v for k, v in self._open.items() if k >= oldest}
            self._finished = {k for k in self._finished if k >= oldest}
