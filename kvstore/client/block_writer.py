"""Writes granted blocks into the segments they were allocated in."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.client.block_sums import Sums
from kvstore.client.steps import Steps, reach, settle, work
from kvstore.copying import WRITE_STREAM_BYTES_MIN, copy_and_sum
from kvstore.errors import NodeUnreachable
from kvstore.wire.messages import Allocated, Medium, NodeAddress
from kvstore.wire.peer_messages import Written
from transfer import AccessRefused, Priority, TransferError

if TYPE_CHECKING:
    from kvstore.client.pieces import Pieces
    from kvstore.client.segment_keys import SegmentKeys
    from kvstore.client.source import Source
    from kvstore.client.writes_under_way import WriteUnderWay
    from transfer import RegionKey, Transfer, TransferEngine
    from transfer.prepared import InPlace

logger = logging.getLogger(__name__)

Ints = NDArray[np.int64]
NOTHING: Final = np.zeros(0, dtype=np.int64)
# Of what goes to a disk: it begins with a little, while the rest is asked for; so much is asked for
# at a time, and the node and the master are told of what is there while the next is written.
FIRST_BYTES: Final = 8 << 20
PORTION_BYTES: Final = 16 << 20


@dataclass(slots=True, kw_only=True)
class WriteResult:
    """Granted rows by what became of them, and the nodes that could not be reached.

    `aborted`: nothing is under way. `unsettled`: bytes may be under way for all we know.
    `void`: those aborted because another master than the one that granted them has come.
    `unreached`: those aborted because their node could not be reached.
    """

    written: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    unsettled: list[int] = field(default_factory=list)
    void: list[int] = field(default_factory=list)
    unreached: list[int] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class UnderWay:
    """Rows that are being written to one segment.

    Attributes:
        where: The segment.
        rows: Which.
        transfers: Writes them.
        failed: It has ended, and nobody knows what of it may still be under way.
    """

    where: NodeAddress
    rows: Ints
    transfers: list[Transfer]
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Begun:
    """Granted copies that are being written, row i copy `i % replicas` of block `i // replicas`.

    Attributes:
        source: The blocks.
        granted: Where they go.
        replicas: Copies of each block.
        offsets: [rows] int64, of each in its segment.
        under_way: What has not been waited for, in the order in which it is: portions of a segment
            from the last of its rows to the first.
        result: What became of all others.
    """

    source: Source
    granted: Allocated
    replicas: int
    offsets: Ints
    under_way: deque[UnderWay] = field(default_factory=deque)
    result: WriteResult = field(default_factory=WriteResult)

    @classmethod
    def of(cls, source: Source, granted: Allocated) -> Begun:
        """Nothing is under way yet."""
        return cls(
            source=source,
            granted=granted,
            # A master that knows no replicas grants one row per block.
            replicas=max(1, len(granted.node_idx) // source.num_blocks),
            offsets=np.array(granted.offsets, dtype=np.int64),
        )

    @property
    def in_portions(self) -> bool:
        """Whether several are under way in one segment."""
        return len({(p.where.node, p.where.segment) for p in self.under_way}) < len(self.under_way)


class BlockWriter:
    """One-sided writes: one transfer per segment and region, all at once. Thread-safe.

    Args:
        engine: Moves the bytes.
        segments: Keys to the nodes' segments.
    """

    def __init__(self, engine: TransferEngine, segments: SegmentKeys) -> None:
        self._engine = engine
        self._segments = segments

    def knows(self, where: NodeAddress) -> bool:
        """Tell whether a segment can be written to without asking for its key first."""
        return self._segments.known(where) is not None

    def begin(
        self,
        begun: Begun,
        write: WriteUnderWay,
        *,
        reach_s: float,
        deadline_s: float,
        rows: Ints | None = None,
    ) -> Steps[None]:
        """Begin to write granted copies, or those of some rows, which rise.

        Checksums that are not known yet come with the copy into mapped memory. A node that has
        offered no key by `reach_s` is not waited for longer. Until `end` has ended what is under
        way, the bytes must stay as they are.
        """
        source, result, under_way = begun.source, begun.result, list[UnderWay]()
        node_idx = np.array(begun.granted.node_idx, dtype=np.int64)
        yield from work(source.pieces.nbytes)
        for index, where in enumerate(begun.granted.nodes):
            among = node_idx if rows is None else node_idx[rows]
            theirs = np.flatnonzero(among == index)
            if rows is not None:
                theirs = rows[theirs]
            if not len(theirs):
                continue
            try:
                key = self._segments.known(where)
                if key is None:
                    key = yield from reach(where, reach_s)
            except NodeUnreachable as error:
                self._lose(where, error, result)
                result.aborted += theirs.tolist()
                result.unreached += theirs.tolist()
                continue
            if not write.may_start((where.node, where.segment)):
                result.aborted += theirs.tolist()
                result.void += theirs.tolist()
                continue
            under_way += self._begin(
                source, where, key, theirs, begun.offsets, begun.replicas, result,
                deadline_s=deadline_s,
            )  # fmt: skip
        begun.under_way.extend(sorted(under_way, key=_first_row, reverse=True))

    def sum_up(self, begun: Begun) -> Steps[None]:
        """Take the checksums that nobody has yet, while the transfers are under way."""
        source = begun.source
        if source.sums.complete or not begun.under_way:
            return
        blocks = [written.rows // begun.replicas for written in begun.under_way]
        missing = source.sums.missing(np.concatenate(blocks))
        if len(missing):
            yield from work(int(source.lengths[missing].sum()))
            source.sums.meet(missing, source.sum_up(missing))

    def end(self, begun: Begun) -> Steps[None]:
        """Wait for the next that is under way, and tell its node what it holds now.

        It learns so before the master does: a node that knows of a block too many is harmless, one
        too few would lose it with the master.
        """
        written = begun.under_way.popleft()
        yield from self._end(begun.source, written, begun.offsets, begun.replicas, begun.result)

    def _begin(
        self,
        source: Source,
        where: NodeAddress,
        key: RegionKey,
        rows: Ints,
        offsets: Ints,
        replicas: int,
        result: WriteResult,
        *,
        deadline_s: float,
    ) -> list[UnderWay]:
        """Start the writes of some rows to one segment; in portions if it is a disk."""
        under_way: list[UnderWay] = []
        for first, end in self._portions(where, source.lengths[rows // replicas]):
            part, rest = rows[first:end], rows[:end]
            started: list[Transfer] = []
            try:
                changed = self._start(
                    source, where, key, part // replicas, offsets[part], started, deadline_s
                )
            except TransferError as error:
                self._lose(where, error, result)
                # Raised at once, so nothing is under way, unless others had been started before.
                if started:
                    result.unsettled += part.tolist()
                    rest = rows[:first]
                result.aborted += rest.tolist()
                result.unreached += rest.tolist()
                break
            if len(changed):  # their checksums are those of bytes that are no more
                logger.warning("%s blocks changed while they were being put", len(changed))
                result.aborted += part[changed].tolist()
                part = np.delete(part, changed)
            under_way.append(UnderWay(where=where, rows=part, transfers=started))
        return under_way

    def _portions(self, where: NodeAddress, lengths: Ints) -> list[tuple[int, int]]:
        """Return bounds of runs of rows that are written by one transfer each, the last first.

        The master learns of what comes first at the end, so that the root of a chain is the
        youngest of it.
        """
        if where.medium is not Medium.SSD or int(lengths.sum()) <= PORTION_BYTES:
            return [(0, len(lengths))]
        bounds, nbytes, limit = [len(lengths)], 0, FIRST_BYTES
        for row, length in zip(range(len(lengths), 0, -1), lengths[::-1].tolist(), strict=True):
            if nbytes and nbytes + length > limit:
                bounds.append(row)
                nbytes, limit = 0, PORTION_BYTES
            nbytes += length
        return [(first, end) for end, first in pairwise([*bounds, 0])]

    def _start(
        self,
        source: Source,
        where: NodeAddress,
        key: RegionKey,
        blocks: Ints,
        offsets: Ints,
        started: list[Transfer],
        deadline_s: float,
    ) -> Ints:
        """Start the writes of some blocks; return those, by position, that turn out changed."""
        pieces, granted = source.pieces_of(blocks)
        targets = offsets[granted] + pieces.starts
        mapped = self._engine.in_place(where.node, key) if source.pieces.one_each else None
        if mapped is not None:
            return source.sums.meet(blocks, copy_into(where.node, mapped, pieces, targets))
        for region, rows in pieces.by_region(np.arange(len(pieces))):
            transfer = self._engine.write(
                where.node,
                region,
                key,
                pieces.offsets[rows],
                targets[rows],
                pieces.lengths[rows],
                priority=Priority.KV_PUT,
                timeout_s=max(0.001, deadline_s - time.monotonic()),
            )
            started.append(transfer)
        return NOTHING

    def _end(
        self,
        source: Source,
        written: UnderWay,
        offsets: Ints,
        replicas: int,
        result: WriteResult,
    ) -> Steps[None]:
        rows = written.rows.tolist()
        failure: TransferError | None = None
        for transfer in written.transfers:
            try:
                yield from settle(transfer)
            except TransferError as error:
                failure = error
        try:
            if failure is None and rows:
                blocks = written.rows // replicas
                held = source.held(blocks, offsets[written.rows].tolist())
                yield from self._tell(written.where, Written(held, written.where.segment))
        except TransferError as error:
            failure = error
        if failure is None:
            result.written += rows
        else:
            written.failed = True
            self._lose(written.where, failure, result)
            result.unsettled += rows

    def _tell(self, where: NodeAddress, note: Written) -> Steps[None]:
        left = self._segments.leave(where, note)
        if left is None:
            self._segments.tell(where.node, note)
        else:
            yield from settle(left)

    def _lose(self, where: NodeAddress, error: Exception, result: WriteResult) -> None:
        logger.warning("blocks for %s not written: %s", where.node, error)
        self._segments.forget(where.node)
        result.lost_nodes.append(where.node)


def _first_row(written: UnderWay) -> int:
    return int(written.rows[0]) if len(written.rows) else 0


def copy_into(node: str, mapped: InPlace, pieces: Pieces, targets: Ints) -> Sums:
    """Copy pieces into memory that is mapped here; return the checksum of each as it lies there."""
    if (targets < 0).any() or (targets + pieces.lengths > len(mapped.array)).any():
        raise AccessRefused(node, "a block outside of its segment")
    found = np.zeros(len(pieces), dtype=np.uint64)
    for region, rows in pieces.by_region(np.arange(len(pieces))):
        found[rows] = copy_and_sum(
            mapped.array, region.array, targets[rows], pieces.offsets[rows], pieces.lengths[rows],
            stream_bytes=WRITE_STREAM_BYTES_MIN,
        )  # fmt: skip
    mapped.wrote_bytes(pieces.nbytes)
    return found
