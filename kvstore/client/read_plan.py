"""What has to be read so that the pieces asked for can be verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.client.locations import Hit
from kvstore.client.pieces import Pieces

if TYPE_CHECKING:
    from transfer import Region

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Rows of a plan's reads that are one run of bytes of a block, verified as one.

    `first_chunk`: where the run starts in the part table, if the block has one.
    """

    block: int
    rows: tuple[int, ...]
    first_chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopyOut:
    block: int
    source_offset: int
    row: int  # of the pieces asked for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadPlan:
    """Reads, and how each is verified.

    Attributes:
        reads: What to read: into the target, or into a bounce buffer.
        whole: [.] rows of `reads` that are whole blocks without a table.
        checks: All other rows.
        wanted: The pieces asked for.
        bounce: Where what cannot be read in place goes; None if all can.
        copies: What to copy from there.
    """

    reads: Pieces
    whole: Ints
    checks: tuple[Check, ...]
    wanted: Pieces
    bounce: Region | None = None
    copies: tuple[_CopyOut, ...] = ()

    def copy_out(self, reached: NDArray[np.bool_]) -> None:
        """Copy from the bounce buffer to where it was wanted."""
        if self.bounce is None:
            return
        for copy in self.copies:
            if reached[copy.block]:
                (target,) = self.wanted.arrays([copy.row])
                end = copy.source_offset + len(target)
                target[:] = self.bounce.array[copy.source_offset : end]


def plan_read(hit: Hit, wanted: Pieces, *, borrow: Callable[[int], Region]) -> ReadPlan:
    """Plan the reading of some pieces of the blocks of a hit.

    Args:
        hit: The blocks.
        wanted: Pieces of them, each inside its block's payload.
        borrow: Lends a bounce buffer of so many bytes.
    """
    entire = (wanted.starts == 0) & (wanted.lengths == hit.lengths[wanted.blocks])
    plain = np.flatnonzero(entire & (hit.chunk_bytes[wanted.blocks] == 0))
    if len(plain) == len(wanted):
        return ReadPlan(reads=wanted, whole=plain, checks=(), wanted=wanted)
    planner = _Planner(hit, wanted, plain.tolist())
    others = np.delete(np.arange(len(wanted)), plain)
    cuts = np.flatnonzero(np.diff(wanted.blocks[others])) + 1
    for rows in np.split(others, cuts):
        planner.add(rows.tolist())
    return planner.plan(len(plain), borrow)


class _Planner:
    """Takes the rows of one block after the other."""

    def __init__(self, hit: Hit, wanted: Pieces, plain: list[int]) -> None:
        self._hit = hit
        self._wanted = wanted
        self._in_place = plain  # rows of `wanted` that are read to where they are wanted
        self._checks: list[Check] = []
        self._covers: list[_Span] = []  # what is read into the bounce buffer
        self._bounced: list[tuple[int, int]] = []  # row, index of its cover

    def add(self, rows: list[int]) -> None:
        wanted, block = self._wanted, int(self._wanted.blocks[rows[0]])
        nbytes, chunk = int(self._hit.lengths[block]), int(self._hit.chunk_bytes[block])
        spans = [_Span(block, int(wanted.starts[row]), int(wanted.lengths[row])) for row in rows]
        if _tile(spans, nbytes):
            self._read_in_place(block, rows, 0)
            return
        for row, span in zip(rows, spans, strict=True):
            cover = span.cover(nbytes, chunk)
            if cover == span:
                self._read_in_place(block, [row], span.start // chunk)
                continue
            if not self._covers or self._covers[-1] != cover:
                self._covers.append(cover)
            self._bounced.append((row, len(self._covers) - 1))

    def plan(self, num_plain: int, borrow: Callable[[int], Region]) -> ReadPlan:
        whole = np.arange(num_plain)
        reads = self._wanted.of(np.array(self._in_place, dtype=np.int64))
        if not self._covers:
            return ReadPlan(
                reads=reads, whole=whole, checks=tuple(self._checks), wanted=self._wanted
            )
        lengths = np.array([cover.nbytes for cover in self._covers], dtype=np.int64)
        offsets = np.cumsum(lengths) - lengths
        bounce = borrow(int(lengths.sum()))
        bounced = Pieces(
            regions=(bounce,),
            region_idx=np.zeros(len(lengths), dtype=np.int64),
            blocks=np.array([cover.block for cover in self._covers], dtype=np.int64),
            starts=np.array([cover.start for cover in self._covers], dtype=np.int64),
            offsets=offsets,
            lengths=lengths,
        )
        checks = self._checks + [
            Check(block=cover.block, rows=(len(reads) + i,), first_chunk=self._chunk(cover))
            for i, cover in enumerate(self._covers)
        ]
        copies = []
        for row, index in self._bounced:
            cover = self._covers[index]
            offset = int(offsets[index] + self._wanted.starts[row] - cover.start)
            copies.append(_CopyOut(block=cover.block, source_offset=offset, row=row))
        return ReadPlan(
            reads=reads.followed_by(bounced),
            whole=whole,
            checks=tuple(checks),
            wanted=self._wanted,
            bounce=bounce,
            copies=tuple(copies),
        )

    def _read_in_place(self, block: int, rows: list[int], first_chunk: int) -> None:
        placed = len(self._in_place)
        self._in_place += rows
        numbers = tuple(range(placed, placed + len(rows)))
        self._checks.append(Check(block=block, rows=numbers, first_chunk=first_chunk))

    def _chunk(self, cover: _Span) -> int:
        chunk = int(self._hit.chunk_bytes[cover.block])
        return cover.start // chunk if chunk else 0


class _Span(NamedTuple):
    """Bytes `[start, start + nbytes)` of a block's payload."""

    block: int
    start: int
    nbytes: int

    def cover(self, payload_bytes: int, chunk_bytes: int) -> _Span:
        """Return the least bytes around it that can be verified."""
        if not chunk_bytes:
            return _Span(self.block, 0, payload_bytes)
        start = self.start // chunk_bytes * chunk_bytes
        end = -(-(self.start + self.nbytes) // chunk_bytes) * chunk_bytes
        return _Span(self.block, start, min(end, payload_bytes) - start)


def _tile(spans: list[_Span], payload_bytes: int) -> bool:
    """Whether the spans are all of a block, without gap or overlap."""
    position = 0
    for span in spans:
        if span.start != position:
            return False
        position += span.nbytes
    return position == payload_bytes
