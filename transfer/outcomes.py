"""How operations over rails end badly: what the owner answered, or what became of the peer."""

from __future__ import annotations

from transfer.errors import AccessRefused, PeerLost, RegionUnknown, TransferError
from transfer.handle import Transfer
from transfer.wire import Status


def refusal(peer: str, status: Status) -> AccessRefused:
    """Return what a status other than OK means to the caller."""
    if status is Status.UNKNOWN:
        return RegionUnknown(peer, "the key was withdrawn, or never offered to us")
    if status is Status.NO_RIGHT:
        return AccessRefused(peer, "the key does not give this right")
    if status is Status.GONE:
        return AccessRefused(peer, "the memory is not there any more")
    return AccessRefused(peer, "a piece is outside of the offered window")


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
