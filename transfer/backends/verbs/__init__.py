"""RDMA: one-sided writes and reads by the network cards, through libibverbs and pyverbs.

pyverbs must be of the same rdma-core release as the machine's libibverbs, so it is provided by
the host (Debian: python3-pyverbs) and imported softly: without it, or without a device, this
backend does not exist and says why. Nothing outside of this package imports pyverbs.

What is where: `device` finds and opens devices, `chain` posts many work requests in one call,
`queue_pair` and `completion` wrap the verbs objects, `domain` holds what is registered for one
peer, `requester` is our end of a rail, `responder` the peer's, `exchange` and `messages` let the
two agree over the control connection, `backend` is what the engine sees.

Isolation: each peer has a protection domain of its own on each device, and each offer is a memory
region of its own in there, with the exact window and rights. So the card checks bounds and
rights; a key that leaked is useless to any other peer; withdrawing deregisters; fencing destroys
the queue pairs.
"""

from __future__ import annotations

import functools
from pathlib import Path

DEVICES = Path("/sys/class/infiniband")


@functools.cache
def unavailable() -> str | None:
    """Say why there is no RDMA here; None if there is. Looked at once."""
    if not DEVICES.is_dir() or not any(DEVICES.iterdir()):
        return "no RDMA device"
    try:
        import pyverbs.device  # noqa: F401
    except ImportError as error:
        return f"pyverbs cannot be imported: {error}"
    return None
