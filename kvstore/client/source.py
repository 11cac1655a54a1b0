"""The blocks of one put: names, bytes in pieces, checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.checksum import block_checksums, joined_checksum, part_table, table_checksum
from kvstore.client.pieces import Pieces
from kvstore.client.put_options import PutOptions
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
        checksums: Of each.
        pieces: Where the bytes are, part tables included (as pieces behind the payload).
        first_piece: [N + 1] int64: pieces `[first_piece[i], first_piece[i + 1])` are block i's.
        options: How to store them.
        tenant: Who is charged.
    """

    keys: Sequence[bytes]
    lengths: Ints
    checksums: Sequence[int]
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
            checksums=[self.checksums[i] for i in blocks],
            pieces=pieces.naming(positions, one_each=self.pieces.one_each),
            first_piece=_first_pieces(positions, len(chosen)),
            options=self.options,
            tenant=self.tenant,
        )

    def held(self, blocks: Sequence[int], offsets: list[int]) -> HeldBlocks:
        """Describe blocks that lie at these offsets of a segment now."""
        count, options = len(blocks), self.options
        return HeldBlocks(
            keys=[self.keys[i] for i in blocks],
            offsets=offsets,
            lengths=self.lengths[blocks].tolist(),
            checksums=[self.checksums[i] for i in blocks],
            pinned=[options.pin is Pin.HARD] * count,
            chunk_bytes=[options.chunk_bytes] * count if options.chunk_bytes else [],
            tenants=[self.tenant] * count if self.tenant else [],
            groups=[options.group] * count if options.group else [],
        )


def plain_source(keys: Sequence[bytes], pieces: Pieces, options: PutOptions, tenant: str) -> Source:
    """Describe blocks without part tables; their checksums are computed here.

    Args:
        keys: [N] names.
        pieces: Checked; blocks `0 .. N - 1`, each from its first byte to its last.
        options: With `chunk_bytes` 0.
        tenant: Who is charged.
    """
    assert not options.chunk_bytes, options
    one_each = pieces.one_each
    first = np.arange(len(keys) + 1) if one_each else _first_pieces(pieces.blocks, len(keys))
    if one_each and len(pieces.regions) == 1:
        array = pieces.regions[0].array
        checksums = block_checksums(array, pieces.offsets, pieces.lengths)
        lengths = pieces.lengths
    else:
        bounds = first.tolist()
        checksums = [
            joined_checksum(pieces.arrays(range(bounds[i], bounds[i + 1])))
            for i in range(len(keys))
        ]
        lengths = np.add.reduceat(pieces.lengths, first[:-1])
    return Source(
        keys=keys,
        lengths=lengths,
        checksums=checksums,
        pieces=pieces,
        first_piece=first,
        options=options,
        tenant=tenant,
    )


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
        checksums=[table_checksum(table) for table in tables],
        pieces=joined,
        first_piece=_first_pieces(joined.blocks, len(keys)),
        options=options,
        tenant=tenant,
    )
    return source, region


def _first_pieces(blocks: Ints, num_blocks: int) -> Ints:
    return np.searchsorted(blocks, np.arange(num_blocks + 1)).astype(np.int64)
