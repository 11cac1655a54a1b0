"""How operations over rails end badly: what the owner answered, or what became of the peer."""

from __future__ import annotations

from typing import Final

from transfer.errors import AccessRefused, PeerLost, RegionUnknown, TransferError
from transfer.handle import Transfer
from transfer.wire import Status

_REASONS: Final = {
    Status.UNKNOWN: "the key was withdrawn, or never offered to us",
    Status.NO_RIGHT: "the key does not give this right",
    Status.GONE: "the memory is not there any more",
    Status.OUT_OF_BOUNDS: "a piece is outside of the offered window",
}


def refusal(handle: Transfer, status: Status) -> AccessRefused:
    """Return what a status other than OK means to a transfer that was under way."""
    kind = RegionUnknown if status is Status.UNKNOWN else AccessRefused
    return kind(
        handle.peer,
        _REASONS[status],
        backend=handle.backend,
        attempts=handle.attempts,
        bytes_moved=handle.bytes_moved,
        elapsed_s=handle.elapsed_s,
        rail=handle.rail_name,
    )


def loss(handle: Transfer, error: TransferError) -> TransferError:
    """Return what the end of a peer means to a transfer that was under way."""
    if not isinstance(error, PeerLost):
        return error
    return PeerLost(
        error.peer,
        error.evidence,
        backend=handle.backend,
        attempts=handle.attempts,
        bytes_moved=handle.bytes_moved,
        elapsed_s=handle.elapsed_s,
        rail=handle.rail_name,
    )
