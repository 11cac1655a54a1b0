"""Operations and the slices they are cut into: what rails carry.

A slice is the unit of sending, of failing and of sending again. Writing one twice is harmless:
the owner drops what it has, or gets the same bytes.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field

import numpy as np

from transfer.handle import Transfer
from transfer.memory.region import Region
from transfer.pieces import EMPTY, Pieces
from transfer.priority import Priority
from transfer.wire import RequestKind


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """One transfer on its way over rails. Local offsets are `source_offsets` of a write's
    pieces, `target_offsets` of a read's.

    Attributes:
        kind: what the owner of the memory is asked for.
        handle: what the caller waits for.
        token: names the owner's window.
        region: our memory; None for a map request.
        immediate: counted at the owner once all slices are in place.
        note: kept by the owner once all slices are in place, of a write over tcp without an
            immediate; empty = none.
        priority: its class of traffic.
        transfer_id: unique per peer, ascending; given when it is submitted.
        slices: all of it, in order of `idx`.
        signal: the last of the slices, empty, which carries the immediate of the others over
            rails that do not order it by themselves; it goes out when they are done.
        num_finished: how many slices are done.
        place: of a map request that succeeded: descriptor, offset and size.
        movable: whether any backend can move it: both ends have addresses.
        queued_at: `time.monotonic` of its submission.
        rails: tiers of rails that suit the local memory alike, the best first; empty = no
            preference. Indices into the peer's rails.
    """

    kind: RequestKind
    handle: Transfer
    token: bytes
    region: Region | None
    immediate: int | None
    note: bytes = b""
    priority: Priority = Priority.ACTIVATIONS
    transfer_id: int = 0
    slices: list[Slice] = field(default_factory=list)
    signal: Slice | None = None
    num_finished: int = 0
    place: tuple[int, int, int] | None = None
    queued_at: float = 0.0
    movable: bool = False
    rails: tuple[tuple[int, ...], ...] = ()

    @property
    def num_slices(self) -> int:
        """How many slices it has."""
        return len(self.slices)

    def drop_place(self) -> None:
        """Close what a map request has brought too late: nobody waits for it any more."""
        place, self.place = self.place, None
        if place is not None:
            os.close(place[0])


@dataclass(slots=True, eq=False)
class Slice:
    """A part of an operation that travels as one.

    Attributes:
        operation: what it is a part of.
        idx: its number within the operation.
        pieces: what it moves; empty for a signal or a map request.
        nbytes: their bytes.
        attempts: how often it was posted.
        oldest: lowest transfer id that is unfinished at the time of posting; what is below it
            can be forgotten by the owner. Set by the sprayer before each post.
        done: it is in place, or its operation has ended, whatever else arrives about it.
        queued: it waits for a rail.
        avoid: index of the rail on which it failed last, -1 if none.
        posted_at: `time.monotonic` of the last post.
    """

    operation: Operation
    idx: int
    pieces: Pieces
    nbytes: int
    attempts: int = 0
    oldest: int = 0
    done: bool = False
    queued: bool = False
    avoid: int = -1
    posted_at: float = 0.0

    @property
    def key(self) -> tuple[int, int]:
        """Transfer id and index: its name on the wire."""
        return self.operation.transfer_id, self.idx

    @property
    def urgent(self) -> bool:
        """Whether it belongs to an urgent class."""
        return self.operation.priority is Priority.ACTIVATIONS


def slice_operation(
    operation: Operation, pieces: Pieces, *, slice_bytes: int, slice_pieces: int
) -> None:
    """Give an operation its slices; one empty slice if there is nothing to move."""
    nbytes = operation.handle.nbytes
    if len(pieces) <= slice_pieces and nbytes <= slice_bytes:
        operation.slices = [Slice(operation, 0, pieces if nbytes else EMPTY, nbytes)]
        return
    parts = cut(pieces, slice_bytes=slice_bytes, slice_pieces=slice_pieces)
    operation.slices = [Slice(operation, i, part, part.nbytes) for i, part in enumerate(parts)]


def add_signal(operation: Operation) -> None:
    """Let the immediate of an operation of several slices follow them in a slice of its own."""
    if operation.immediate is not None and operation.num_slices > 1:
        operation.signal = Slice(operation, operation.num_slices, EMPTY, 0)
        operation.slices.append(operation.signal)


def cut(pieces: Pieces, *, slice_bytes: int, slice_pieces: int) -> list[Pieces]:
    """Cut pieces into slices of at most `slice_bytes` bytes and `slice_pieces` pieces.

    A long piece is cut at the multiples of `slice_bytes` of the running total:

        pieces    |--------- 0 ---------|-1-|------ 2 ------|
        slices    [---- 0 ----)[---- 1 ----)[---- 2 ----)[--)
    """
    if len(pieces) == 1:
        return _cut_one(pieces, slice_bytes)
    length = int(pieces.lengths[0]) if len(pieces) else 0
    if 0 < length <= slice_bytes and (pieces.lengths == length).all():
        return _cut_between(pieces, min(slice_bytes // length, slice_pieces))
    ends = np.cumsum(pieces.lengths)
    total = int(ends[-1]) if len(ends) else 0
    if not total:
        return []
    starts = ends - pieces.lengths
    cuts = np.unique(np.concatenate([starts, np.arange(0, total, slice_bytes, dtype=np.int64)]))
    owner = np.searchsorted(starts, cuts, side="right") - 1
    shift = cuts - starts[owner]
    lengths = np.diff(cuts, append=total)
    source = pieces.source_offsets[owner] + shift
    target = pieces.target_offsets[owner] + shift
    bounds = np.flatnonzero(np.diff(cuts // slice_bytes, prepend=-1, append=-1))
    slices = []
    for low, high in itertools.pairwise(bounds):
        for first in range(int(low), int(high), slice_pieces):
            part = slice(first, min(first + slice_pieces, int(high)))
            slices.append(Pieces(source[part], target[part], lengths[part]))
    return slices


def _cut_between(pieces: Pieces, count: int) -> list[Pieces]:
    """Pieces of one length, such as pages: so many of them, uncut, to a slice."""
    parts = [slice(first, first + count) for first in range(0, len(pieces), count)]
    source, target, lengths = pieces.source_offsets, pieces.target_offsets, pieces.lengths
    return [Pieces(source[part], target[part], lengths[part]) for part in parts]


def _cut_one(pieces: Pieces, slice_bytes: int) -> list[Pieces]:
    """One long piece, without a search for what belongs to which slice."""
    total = int(pieces.lengths[0])
    starts = np.arange(0, total, slice_bytes, dtype=np.int64)
    source, target = pieces.source_offsets + starts, pieces.target_offsets + starts
    lengths = np.full(len(starts), slice_bytes, dtype=np.int64)
    lengths[-1] = total - starts[-1]
    return [
        Pieces(source[i : i + 1], target[i : i + 1], lengths[i : i + 1]) for i in range(len(starts))
    ]
