"""Blocks of a hit, read where they lie as far as that can be; the rest is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.checksum import lies_right
from kvstore.client.locations import Hit
from kvstore.client.mapped_memory import memory_of
from kvstore.client.pieces import Pieces
from kvstore.client.steps import Steps, work
from kvstore.client.view import View, release_all
from kvstore.copying import checksum_column

if TYPE_CHECKING:
    from kvstore.client.client_core import ClientCore
    from kvstore.client.lease_keeper import LeaseKeeper
    from kvstore.client.segment_keys import SegmentKeys

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
_ALIGNMENT = 64


class _Shared(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A segment's memory, as it is handed out: `token` lives as long as anything made of it."""

    token: object


class _Token:
    """See `View`."""


class BlockView(View):
    """The blocks of a hit, verified and read-only. Made by `StoreClient.view`; see `View`.

    Attributes:
        hit: What they are; its lease is the view's.
        placed: [num_blocks] bool, whether a block is read in place; else it was copied.
        good: [num_blocks] bool, whether a block is there at all, whole and right.
    """

    __slots__ = ("_memories", "_segments", "good", "hit", "placed")

    def __init__(
        self,
        hit: Hit,
        keeper: LeaseKeeper,
        segments: Sequence[Bytes | None],
        copies: Sequence[Bytes | None],
        token: object,
    ) -> None:
        """Hand them out.

        Args:
            hit: The blocks.
            keeper: Renews the lease.
            segments: Of each block, the memory that it lies in; None if it is not read there.
            copies: Of each other, its bytes; None if it is not to be had.
            token: What the lease is kept for; of nobody else.
        """
        self.placed = np.array([segment is not None for segment in segments], dtype=bool)
        self.good = self.placed | np.array([copy is not None for copy in copies], dtype=bool)
        super().__init__(hit.lease if self.placed.any() else None, keeper, token)
        self.hit = hit
        self._segments = segments
        shared: dict[int, memoryview] = {}
        self._memories: list[memoryview | None] = []
        places = zip(segments, copies, hit.offsets.tolist(), hit.lengths.tolist(), strict=True)
        for segment, copy, offset, nbytes in places:
            if segment is None:
                self._memories.append(None if copy is None else copy.data.toreadonly())
                continue
            if id(segment) not in shared:
                shared[id(segment)] = _share(segment, token)
            self._memories.append(shared[id(segment)][offset : offset + nbytes])
        release_all(shared.values())

    @property
    def num_good(self) -> int:
        """How many leading blocks are there, whole and right."""
        bad = np.flatnonzero(~self.good)
        return int(bad[0]) if len(bad) else self.hit.num_blocks

    def memory(self, block: int) -> memoryview | None:
        """Return a block's bytes, read-only; None if no copy of it could be had.

        Raises:
            StoreClosed: The view was closed.
        """
        self._check_open()
        return self._memories[block]

    def lies_right(self) -> bool:
        """See `View`."""
        return all(_right(self.hit, np.flatnonzero(self.placed), self._segments))

    def _let_go(self) -> None:
        release_all(memory for memory in self._memories if memory is not None)
        self._memories.clear()


def open_blocks(
    core: ClientCore,
    segments: SegmentKeys,
    keeper: LeaseKeeper,
    hit: Hit,
    max_s: float,
    timeout_s: float | None,
) -> Steps[BlockView]:
    """View the blocks of a hit; its lease is taken over. Raises as `StoreClient.view`."""
    deadline_s, token = core.deadline(timeout_s), _Token()
    try:
        memories: list[Bytes | None] = [None] * len(hit.nodes)
        for index in np.unique(hit.node_idx).tolist():
            offset = int(hit.offsets[hit.node_idx == index][0])
            memories[index] = yield from memory_of(segments, hit.nodes[index], offset, deadline_s)
        lies_in = [memories[index] for index in hit.node_idx.tolist()]
        rows = np.flatnonzero([memory is not None for memory in lies_in])
        nbytes = int(hit.lengths[rows].sum())
        if len(rows):
            keeper.keep(hit.lease, max_s=max_s, nbytes=nbytes, seen=token)
        yield from work(nbytes)
        hit.lease.check()
        for row, right in zip(rows.tolist(), _right(hit, rows, lies_in), strict=True):
            if not right:
                lies_in[row] = None
        core.record.count(read_blocks=sum(memory is not None for memory in lies_in))
        copies = yield from _copied(core, hit, lies_in, core.left(deadline_s))
        hit.lease.check()
        view = BlockView(hit, keeper, lies_in, copies, token)
    except BaseException:
        keeper.drop(hit.lease)
        raise
    if not view.in_place:
        keeper.drop(hit.lease)
    return view


def _share(segment: Bytes, token: object) -> memoryview:
    shared = segment.view(_Shared)
    shared.token = token
    shared.flags.writeable = False
    return shared.data


def _right(hit: Hit, rows: Ints, segments: Sequence[Bytes | None]) -> list[bool]:
    """Verify blocks where they lie: those of one segment at once, by two cores if one is idle."""
    right = dict.fromkeys(rows.tolist(), False)
    of_segment: dict[int, list[int]] = {}
    for row in right:
        segment = segments[row]
        assert segment is not None, row
        offset, nbytes = int(hit.offsets[row]), int(hit.lengths[row])
        if hit.chunk_bytes[row]:
            checksum, chunk_bytes = int(hit.checksums[row]), int(hit.chunk_bytes[row])
            right[row] = lies_right(segment, offset, nbytes, checksum, chunk_bytes)
        elif 0 <= offset <= len(segment) - nbytes:
            of_segment.setdefault(id(segment), []).append(row)
    for those in of_segment.values():
        segment = segments[those[0]]
        assert segment is not None, those
        found = checksum_column(segment, hit.offsets[those], hit.lengths[those])
        right.update(zip(those, (found == hit.checksums[those]).tolist(), strict=True))
    return list(right.values())


def _copied(
    core: ClientCore, hit: Hit, segments: Sequence[Bytes | None], left_s: float
) -> Steps[list[Bytes | None]]:
    """Copy the blocks that lie nowhere here into memory of their own."""
    copies: list[Bytes | None] = [None] * hit.num_blocks
    rows = np.flatnonzero([segment is None for segment in segments])
    if not len(rows):
        return copies
    lengths = hit.lengths[rows]
    room = -(-lengths // _ALIGNMENT) * _ALIGNMENT
    offsets = np.cumsum(room) - room
    memory = np.empty(int(room.sum()), dtype=np.uint8)
    region = core.engine.register(torch.from_numpy(memory))
    try:
        pieces = Pieces(
            regions=(region,),
            region_idx=np.zeros(len(rows), dtype=np.int64),
            blocks=rows,
            starts=np.zeros(len(rows), dtype=np.int64),
            offsets=offsets,
            lengths=lengths,
        )
        copied = yield from core.copy(hit, pieces, left_s)
    finally:
        core.engine.release(region)
    for row, offset, nbytes in zip(rows.tolist(), offsets.tolist(), lengths.tolist(), strict=True):
        if row not in copied.bad:
            copies[row] = memory[offset : offset + nbytes]
    return copies
