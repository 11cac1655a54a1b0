"""Where one block lies, and its bytes read from there: what a `Hit` is for many, without columns.

For a small value, arithmetic over columns of one row costs more than the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.client.lease import Lease
from kvstore.client.locations import Hit
from kvstore.copying import copy_with_checksums
from transfer import Priority, TransferError

if TYPE_CHECKING:
    from kvstore.client.segment_keys import SegmentKeys
    from kvstore.wire.messages import Located, NodeAddress
    from transfer import Region, TransferEngine
    from transfer.prepared import InPlace

PLACE_BYTES_MAX: Final = 256 << 10
ONE_PASS_BYTES_MIN: Final = 32 << 10  # below, one call of the engine costs less


class Place(NamedTuple):
    """One copy of a block.

    Attributes:
        where: The segment.
        offset: In the segment.
        nbytes: Of payload.
        checksum: xxh3_64, of the payload or of the part table.
        chunk_bytes: 0: no part table.
        lease: How long it stays there.
    """

    where: NodeAddress
    offset: int
    nbytes: int
    checksum: int
    chunk_bytes: int
    lease: Lease

    @classmethod
    def of_reply(cls, reply: Located, *, asked_s: float) -> Place:
        """Read the reply to a lookup of one key that is there."""
        return cls(
            where=reply.nodes[reply.node_idx[0]],
            offset=reply.offsets[0],
            nbytes=reply.lengths[0],
            checksum=reply.checksums[0],
            chunk_bytes=reply.chunk_bytes[0] if reply.chunk_bytes else 0,
            lease=Lease(reply.lease_id, asked_s + reply.lease_s),
        )

    def as_hit(self, key: bytes) -> Hit:
        """Return the same in columns; `key` is as the pool knows it."""
        return Hit(
            keys=(key,),
            positions=_column(0),
            lease=self.lease,
            nodes=(self.where,),
            node_idx=_column(0),
            offsets=_column(self.offset),
            lengths=_column(self.nbytes),
            checksums=np.array([self.checksum], dtype=np.uint64),
            chunk_bytes=_column(self.chunk_bytes),
        )

    def read_into(
        self, engine: TransferEngine, segments: SegmentKeys, region: Region, offset: int
    ) -> bool:
        """Copy the block to `offset` of a region and verify it.

        Returns:
            False if it has a part table, is large and not mapped here, its segment was never
            reached before, or anything is wrong: then what lies in the region is garbage, and
            `Reading.copy` of `as_hit` does it, or finds out what is wrong and reports it.
        """
        key = segments.known(self.where)
        if key is None or self.chunk_bytes or self.lease.late_s() >= 0:
            return False
        if self.nbytes >= ONE_PASS_BYTES_MIN:
            mapped = engine.in_place(self.where.node, key)
            if mapped is not None:
                found = self._copy(mapped, region, offset)
                return found == self.checksum and self.lease.late_s() < 0
        if self.nbytes > PLACE_BYTES_MAX:
            return False
        try:
            transfer = engine.read(
                self.where.node, region, key, offset, self.offset, self.nbytes,
                priority=Priority.KV_GET,
            )  # fmt: skip
            transfer.wait()
        except TransferError:
            return False
        if self.lease.late_s() >= 0 and not self.lease.adrift:
            return False
        found = xxhash.xxh3_64_intdigest(region.array.data[offset : offset + self.nbytes])
        return found == self.checksum

    def _copy(self, mapped: InPlace, region: Region, offset: int) -> int | None:
        """Copy from memory that is mapped here; return the checksum, None if it does not fit."""
        fits = self.offset >= 0 and self.nbytes <= len(mapped.array) - self.offset
        fits = fits and region.kind == "host" and region.writable
        if not fits or self.nbytes > region.nbytes - offset:
            return None
        (found,) = copy_with_checksums(
            region.array, mapped.array, _column(offset), _column(self.offset), _column(self.nbytes)
        )
        mapped.read_bytes(self.nbytes)
        return found


def _column(number: int) -> NDArray[np.int64]:
    return np.array([number], dtype=np.int64)
