"""Asking for the memory behind a key: a request that is answered with a descriptor."""

from __future__ import annotations

from transfer.handle import Transfer
from transfer.pieces import EMPTY
from transfer.rails.requests import Requests
from transfer.rails.slices import Operation
from transfer.wire import RequestKind


def fetch_place(requests: Requests, token: bytes, deadline: float) -> tuple[int, int, int]:
    """Ask for the memory behind a key; waits. Any thread but the engine's.

    Returns:
        Descriptor (the caller's), offset and size of the window.

    Raises:
        AccessRefused, RegionUnknown, PeerLost, TransferTimeout: the answer, or none.
    """
    handle = Transfer(
        peer=requests.peer, operation="map", backend="shared_memory", nbytes=0, deadline=deadline
    )
    operation = Operation(
        kind=RequestKind.MAP, handle=handle, token=token, region=None, immediate=None
    )
    requests.submit(operation, EMPTY)
    handle.wait()
    assert operation.place is not None
    return operation.place
