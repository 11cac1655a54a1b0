"""The blocks of one put: names, bytes in pieces, checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.checksum import joined_checksum, part_table, table_checksum
from kvstore.client.block_sums import BlockSums, Sums
from kvstore.client.pieces import Pieces
from kvstore.client.put_options import PutOptions
from kvstore.copying import checksum_column
from kvstore.wire.messages import HeldBlocks, Pin

if TYPE_CHECKING:
    from transfer import Region, TransferEngine

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """Columns of one row per block.

    Attributes:
        keys: Names, as the pool knows them.
        lengths: [N] int64, bytes of payload.
        sums: Checksums of each: from the beginning, or from whoever copies or sums them up.
        pieces: Where the bytes are, part tables included (as pieces behind the payload).
        first_piece: [N + 1] int64: pieces `[first_piece[i], first_piece[i + 1])` are block i's.
        options: How to store them.
        tenant: Who is charged.
    """

    keys: Sequence[bytes]
    lengths: Ints
    sums: BlockSums
    pieces: Pieces
    first_piece: Ints
    options: PutOptions
    tenant: str

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        return len(self.keys)

    def pieces_of(self, blocks: Ints) -> tuple[Pieces, Ints]:
        """Return the pieces of some blocks, and for each piece the position in `blocks`."""
        if self.pieces.one_each:
            everything = len(blocks) == self.num_blocks
            return (self.pieces if everything else self.pieces.of(blocks)), np.arange(len(blocks))
        first, counts = self.first_piece[blocks], np.diff(self.first_piece)[blocks]
        positions = np.repeat(np.arange(len(blocks)), counts)
        within = np.arange(len(positions)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.pieces.of(first[positions] + within), positions

    def of(self, blocks: Sequence[int]) -> Source:
        """Keep only some blocks, rising."""
        chosen = np.array(blocks, dtype=np.int64)
        pieces, positions = self.pieces_of(chosen)
        return Source(
            keys=[self.keys[i] for i in blocks],
            lengths=self.lengths[chosen],
            sums=self.sums.of(chosen),
            pieces=pieces.naming(positions, one_each=self.pieces.one_each),
            first_piece=_first_pieces(positions, len(chosen)),
            options=self.options,
            tenant=self.tenant,
        )

    def sum_up(self, blocks: Ints) -> Sums:
        """Return the checksums of the payloads of some blocks, [len(blocks)] uint64."""
        pieces, positions = self.pieces_of(blocks)
        if pieces.one_each or len(pieces) == len(blocks):
            sums = np.zeros(len(blocks), dtype=np.uint64)
            for region, rows in pieces.by_region(np.arange(len(pieces))):
                offsets, lengths = pieces.offsets[rows], pieces.lengths[rows]
                sums[rows] = checksum_column(region.array, offsets, lengths)
            return sums
        bounds = _first_pieces(positions, len(blocks)).tolist()
        return np.array(
            [
                joined_checksum(pieces.arrays(range(first, last)))
                for first, last in pairwise(bounds)
            ],
            dtype=np.uint64,
        )

    def held(self, blocks: Ints, offsets: list[int]) -> HeldBlocks:
        """Describe blocks that lie at these offsets of a segment now."""
        count, options = len(blocks), self.options
        everything = count == self.num_blocks and bool((np.diff(blocks) == 1).all())
        return HeldBlocks(
            keys=list(self.keys) if everything else [self.keys[i] for i in blocks.tolist()],
            offsets=offsets,
            lengths=self.lengths[blocks].tolist(),
            checksums=self.sums.values[blocks].tolist(),
            pinned=[True] * count if options.pin is Pin.HARD else [],
            chunk_bytes=[options.chunk_bytes] * count if options.chunk_bytes else [],
            tenants=[self.tenant] * count if self.tenant else [],
            groups=[options.group] * count if options.group else [],
        )


def plain_source(keys: Sequence[bytes], pieces: Pieces, options: PutOptions, tenant: str) -> Source:
    """Describe blocks without part tables.

    Their checksums are taken on the way, by `BlockWriter`, so that no byte is read twice; of those
    that are pinned here, since the pin may concern blocks that are there already.

    Args:
        keys: [N] names.
        pieces: Checked; blocks `0 .. N - 1`, each from its first byte to its last.
        options: With `chunk_bytes` 0.
        tenant: Who is charged.
    """
    assert not options.chunk_bytes, options
    one_each = pieces.one_each
    first = np.arange(len(keys) + 1) if one_each else _first_pieces(pieces.blocks, len(keys))
    lengths = pieces.lengths if one_each else np.add.reduceat(pieces.lengths, first[:-1])
    source = Source(
        keys=keys,
        lengths=lengths,
        sums=BlockSums.unknown(len(keys)),
        pieces=pieces,
        first_piece=first,
        options=options,
        tenant=tenant,
    )
    if options.pin is not Pin.NONE:
        everything = np.arange(len(keys))
        source.sums.meet(everything, source.sum_up(everything))
    return source


def chunked_source(
    keys: Sequence[bytes],
    pieces: Pieces,
    options: PutOptions,
    tenant: str,
    engine: TransferEngine,
) -> tuple[Source, Region]:
    """Describe blocks with part tables; as `plain_source`.

    Returns:
        The source, and the region of the tables, which the caller releases after the put.
    """
    import torch

    first = _first_pieces(pieces.blocks, len(keys))
    bounds = first.tolist()
    tables = [
        part_table(pieces.arrays(range(bounds[i], bounds[i + 1])), options.chunk_bytes)
        for i in range(len(keys))
    ]
    lengths = np.add.reduceat(pieces.lengths, first[:-1])
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    region = engine.register(torch.from_numpy(np.concatenate(tables)))
    behind = Pieces(
        regions=(region,),
        region_idx=np.zeros(len(keys), dtype=np.int64),
        blocks=np.arange(len(keys)),
        starts=lengths,
        offsets=np.cumsum(sizes) - sizes,
        lengths=sizes,
    )
    joined = pieces.followed_by(behind)
    joined = joined.of(np.argsort(joined.blocks, kind="stable"))
    source = Source(
        keys=keys,
        lengths=lengths,
        sums=BlockSums.told([table_checksum(table) for table in tables]),
        pieces=joined,
        first_piece=_first_pieces(joined.blocks, len(keys)),
        options=options,
        tenant=tenant,
    )
    return source, region


def _first_pieces(blocks: Ints, num_blocks: int) -> Ints:
    return np.searchsorted(blocks, np.arange(num_blocks + 1)).astype(np.int64)
