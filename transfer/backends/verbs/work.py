"""Slices as work: what a queue pair is to do for each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transfer.backends.verbs.chain import READ, WRITE
from transfer.backends.verbs.domain import PeerDomain
from transfer.backends.verbs.plan import Requests, plan
from transfer.pieces import Pieces
from transfer.rails.slices import Slice, cut
from transfer.wire import RequestKind


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """A slice on its way over a queue pair.

    Attributes:
        part: the slice.
        requests: what it is made of; None for a signal.
        opcode: of each request, READ or WRITE.
        immediate: carried by the last one; None = none.
        remote_key, local_key: of the two memories.
        may_inline: whether the processor may read our memory while it posts.
        num_posted: requests that were handed to the card.
        number: how many immediates the pair had carried before this one's, once posted.
    """

    part: Slice
    requests: Requests | None
    opcode: int
    immediate: int | None
    remote_key: int
    local_key: int
    may_inline: bool
    num_posted: int = 0
    number: int | None = None

    @property
    def num_requests(self) -> int:
        """How many requests it needs; a signal needs one."""
        return 1 if self.requests is None else len(self.requests)


def make_work(part: Slice, place: tuple[int, int], domain: PeerDomain, elements_max: int) -> Work:
    """Say what is to be done for a slice.

    Args:
        part: a write or a read.
        place: key and address of the owner's window.
        domain: where our memory is registered, if need be now.
        elements_max: how many of our pieces one request may have.

    Raises:
        PyverbsError: our memory cannot be registered.
    """
    operation, pieces = part.operation, part.pieces
    write = operation.kind is RequestKind.WRITE
    remote_key, remote = place
    local_key, requests, may_inline = 0, None, False
    if part.nbytes:
        assert operation.region is not None, "only signals come without memory"
        local_key, local = domain.local(operation.region)
        may_inline = operation.region.kind == "host"
        if part.nbytes > domain.device.limits.message_bytes:
            pieces = _split(pieces, domain.device.limits.message_bytes)
        ours, theirs = pieces.source_offsets, pieces.target_offsets
        if not write:
            ours, theirs = theirs, ours
        requests = plan(ours + local, theirs + remote, pieces.lengths, elements_max)
    is_last = part.idx == operation.num_slices - 1
    return Work(
        part=part,
        requests=requests,
        opcode=WRITE if write else READ,
        immediate=operation.immediate if is_last else None,
        remote_key=remote_key,
        local_key=local_key,
        may_inline=may_inline,
    )


def _split(pieces: Pieces, message_bytes: int) -> Pieces:
    """Cut pieces that are longer than a message."""
    parts = cut(pieces, slice_bytes=message_bytes, slice_pieces=len(pieces))
    return Pieces(
        np.concatenate([part.source_offsets for part in parts]),
        np.concatenate([part.target_offsets for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )
