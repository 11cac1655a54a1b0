"""Copies bytes of leased blocks into local memory and tells the good ones from the bad.

read                  verified by                          bytes that move
all of a block        its checksum; its table if it has    the payload (and the table once)
a range, whole parts  those parts' entries in the table    the range, and the table once
another range, parts  the parts around it, then copied     the parts around it
another range, none   the checksum, then copied            the whole block
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.checksum import (
    CHECKSUM_BYTES,
    joined_checksum,
    part_table,
    table_bytes,
    table_checksum,
)
from kvstore.client.block_sums import BlockSums, Sums
from kvstore.client.locations import Hit
from kvstore.client.paced_read import GROUPS_MAX, PacedRead
from kvstore.client.pieces import Pieces
from kvstore.client.read_plan import Check, ReadPlan, plan_read
from kvstore.client.steps import Steps, reach, settle, work
from kvstore.copying import checksum_column, copy_and_sum
from kvstore.errors import NodeUnreachable
from kvstore.wire.messages import Medium
from transfer import AccessRefused, Priority, TransferError

if TYPE_CHECKING:
    from kvstore.client.segment_keys import SegmentKeys
    from kvstore.client.staging import Staging
    from transfer import Region, Transfer, TransferEngine
    from transfer.pieces import CopyPieces
    from transfer.prepared import InPlace

Ints = NDArray[np.int64]
_UnderWay = tuple[int, "Transfer", PacedRead | None]  # which node's, and of what it is a part


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What a copy brought.

    Attributes:
        num_good: Length of the leading run of blocks whose bytes are right.
        corrupt: Blocks whose bytes arrived and do not match their checksum.
        unreached: Blocks whose bytes could not be read.
        lost_nodes: Names of the nodes that could not be read from.
    """

    num_good: int
    corrupt: tuple[int, ...]
    unreached: tuple[int, ...]
    lost_nodes: tuple[str, ...]

    @property
    def bad(self) -> tuple[int, ...]:
        """All blocks that are not there, in order."""
        return tuple(sorted((*self.corrupt, *self.unreached)))


class _Attempt:
    """State of one copy: what is found out on the way."""

    def __init__(self, num_blocks: int) -> None:
        self.reached = np.ones(num_blocks, dtype=bool)
        self.sums = BlockSums.unknown(num_blocks)  # of whole blocks, where the copy brought them
        self.corrupt: set[int] = set()
        self.lost: list[str] = []

    def note(self, blocks: Ints, found: Sums) -> None:
        """Take the checksums of whole blocks; one that came twice must have come the same."""
        self.corrupt.update(blocks[self.sums.meet(blocks, found)].tolist())

    def result(self) -> Copied:
        unreached = tuple(np.flatnonzero(~self.reached).tolist())
        corrupt = tuple(sorted(self.corrupt))
        first_bad = min((*corrupt, *unreached, len(self.reached)))
        return Copied(
            num_good=first_bad,
            corrupt=corrupt,
            unreached=unreached,
            lost_nodes=tuple(self.lost),
        )


class BlockReader:
    """One-sided reads: one transfer per node and region, all at once. Thread-safe.

    Args:
        engine: Moves the bytes.
        segments: Keys to the nodes' segments.
        staging: For ranges that must be verified with what is around them.
    """

    def __init__(self, engine: TransferEngine, segments: SegmentKeys, staging: Staging) -> None:
        self._engine = engine
        self._segments = segments
        self._staging = staging

    def copy(self, hit: Hit, pieces: Pieces, *, deadline_s: float) -> Steps[Copied]:
        """Copy pieces of the blocks of a hit into local memory and verify them.

        The lease is looked at before and after. If the later look finds it over, the bytes may
        have moved, and nothing of the copy counts.

        Raises:
            LeaseExpired: See above; the target bytes are garbage.
        """
        hit.lease.check()
        attempt = _Attempt(hit.num_blocks)
        with ExitStack() as stack:
            if hit.chunk_bytes.any():
                yield from self._read_tables(hit, pieces, attempt, stack, deadline_s)
            plan = plan_read(
                hit, pieces, borrow=lambda n: stack.enter_context(self._staging.borrow(n))
            )
            yield from work(plan.reads.nbytes)
            yield from self._read(hit, plan.reads, attempt, deadline_s)
            hit.lease.check()
            self._verify(hit, plan, attempt)
            plan.copy_out(attempt.reached)
        return attempt.result()

    def _read_tables(
        self, hit: Hit, pieces: Pieces, attempt: _Attempt, stack: ExitStack, deadline_s: float
    ) -> Steps[None]:
        """Read and verify the part tables of the blocks that are wanted; kept in the hit."""
        blocks = np.unique(pieces.blocks)
        chunks = hit.chunk_bytes[blocks]
        missing = [b for b in blocks[chunks > 0].tolist() if b not in hit.tables]
        if not missing:
            return
        sizes = np.array(
            [table_bytes(int(hit.lengths[b]), int(hit.chunk_bytes[b])) for b in missing],
            dtype=np.int64,
        )
        ends = np.cumsum(sizes)
        region = stack.enter_context(self._staging.borrow(int(ends[-1])))
        rows = np.array(missing, dtype=np.int64)
        tables = Pieces(
            regions=(region,),
            region_idx=np.zeros(len(rows), dtype=np.int64),
            blocks=rows,
            starts=hit.lengths[rows],
            offsets=ends - sizes,
            lengths=sizes,
        )
        yield from self._read(hit, tables, attempt, deadline_s)
        hit.lease.check()
        for block, table in zip(missing, tables.arrays(range(len(missing))), strict=True):
            if not attempt.reached[block]:
                continue
            if table_checksum(table) == int(hit.checksums[block]):
                hit.tables[block] = table.copy()
            else:
                attempt.corrupt.add(block)

    def _read(self, hit: Hit, pieces: Pieces, attempt: _Attempt, deadline_s: float) -> Steps[None]:
        under_way: deque[_UnderWay] = deque()
        where = hit.node_idx[pieces.blocks]
        for index in np.unique(where).tolist():
            theirs = np.flatnonzero(where == index)
            try:
                of_node = pieces if len(theirs) == len(pieces) else pieces.of(theirs)
                yield from self._start(hit, index, of_node, deadline_s, under_way, attempt)
            except (NodeUnreachable, TransferError):
                self._lose(hit, index, attempt)
        while under_way:
            index, transfer, paced = under_way.popleft()
            try:
                yield from settle(transfer)
                if paced is not None and hit.nodes[index].node not in attempt.lost:
                    more = paced.more()
                    if more is not None:
                        under_way.append((index, more, paced))
                    yield from paced.settled()
            except TransferError:
                self._lose(hit, index, attempt)

    def _start(
        self,
        hit: Hit,
        index: int,
        pieces: Pieces,
        deadline_s: float,
        under_way: deque[_UnderWay],
        attempt: _Attempt,
    ) -> Steps[None]:
        where = hit.nodes[index]
        key = self._segments.known(where)
        if key is None:
            key = yield from reach(where, deadline_s)
        sources = hit.offsets[pieces.blocks] + pieces.starts
        whole = _whole(hit, pieces)
        mapped = self._engine.in_place(where.node, key) if whole else None
        on_disk = whole and where.medium is Medium.SSD
        for region, rows in pieces.by_region(np.arange(len(pieces))):
            if mapped is not None and region.kind == "host" and region.writable:
                _copy(where.node, mapped, region, pieces.of(rows), sources[rows], attempt)
                continue
            of_region = pieces.of(rows)

            def start(
                some: Ints,
                copy: CopyPieces | None = None,
                *,
                region: Region = region,
                pieces: Pieces = of_region,
            ) -> Transfer:
                return self._engine.read(
                    where.node,
                    region,
                    key,
                    pieces.offsets[some],
                    hit.offsets[pieces.blocks[some]] + pieces.starts[some],
                    pieces.lengths[some],
                    priority=Priority.KV_GET,
                    timeout_s=max(0.001, deadline_s - time.monotonic()),
                    copy=copy,
                )

            if on_disk and region.kind == "host":
                own_disk = where.node == self._engine.name
                paced = PacedRead(region, of_region, start, attempt.sums, own_disk=own_disk)
                for _ in range(GROUPS_MAX):
                    if (transfer := paced.more()) is not None:
                        under_way.append((index, transfer, paced))
            else:
                under_way.append((index, start(np.arange(len(rows))), None))

    def _lose(self, hit: Hit, index: int, attempt: _Attempt) -> None:
        name = hit.nodes[index].node
        attempt.reached[hit.node_idx == index] = False
        if name not in attempt.lost:
            attempt.lost.append(name)
        self._segments.forget(name)

    def _verify(self, hit: Hit, plan: ReadPlan, attempt: _Attempt) -> None:
        rows = plan.whole[attempt.reached[plan.reads.blocks[plan.whole]]]
        blocks = plan.reads.blocks[rows]
        for region, missing in plan.reads.by_region(rows[~attempt.sums.known[blocks]]):
            offsets, lengths = plan.reads.offsets[missing], plan.reads.lengths[missing]
            found = checksum_column(region.array, offsets, lengths)
            attempt.note(plan.reads.blocks[missing], found)
        wrong = blocks[attempt.sums.values[blocks] != hit.checksums[blocks]]
        attempt.corrupt.update(wrong.tolist())
        for check in plan.checks:
            if attempt.reached[check.block] and not _is_right(hit, check, plan.reads):
                attempt.corrupt.add(check.block)


def _whole(hit: Hit, pieces: Pieces) -> bool:
    """Whether all pieces are whole blocks, and blocks without part tables."""
    return not hit.chunk_bytes.any() and bool((pieces.lengths == hit.lengths[pieces.blocks]).all())


def _copy(
    node: str,
    mapped: InPlace,
    region: Region,
    pieces: Pieces,
    sources: Ints,
    attempt: _Attempt,
) -> None:
    """Copy from memory that is mapped here, and take the checksums in the same pass."""
    if (sources < 0).any() or (sources + pieces.lengths > len(mapped.array)).any():
        raise AccessRefused(node, "a block outside of its segment")
    found = copy_and_sum(region.array, mapped.array, pieces.offsets, sources, pieces.lengths)
    attempt.note(pieces.blocks, found)
    mapped.read_bytes(int(pieces.lengths.sum()))


def _is_right(hit: Hit, check: Check, reads: Pieces) -> bool:
    arrays = reads.arrays(check.rows)
    chunk_bytes = int(hit.chunk_bytes[check.block])
    if not chunk_bytes:
        return joined_checksum(arrays) == int(hit.checksums[check.block])
    table = hit.tables.get(check.block)
    if table is None:
        return False  # known to be corrupt already
    found = part_table(arrays, chunk_bytes)
    first = check.first_chunk * CHECKSUM_BYTES
    return bool(np.array_equal(found, table[first : first + len(found)]))
