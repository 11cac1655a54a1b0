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
from kvstore.client.steps import Steps, settle, work
from kvstore.copying import READ_STREAM_BYTES_MIN, bytes_with_checksum, copy_with_checksum
from transfer import Priority, TransferError

if TYPE_CHECKING:
    from kvstore.client.segment_keys import SegmentKeys
    from kvstore.wire.messages import Located, NodeAddress
    from transfer import Region, TransferEngine
    from transfer.prepared import InPlace

PLACE_BYTES_MAX: Final = 4 << 20  # that are not mapped here: the call's own deadline is not known
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
        if self.nbytes > region.nbytes - offset:
            return False
        if self.nbytes >= ONE_PASS_BYTES_MIN:
            mapped = engine.in_place(self.where.node, key)
            if mapped is not None:
                if region.kind != "host" or not region.writable:
                    return False
                return self._copy(mapped, region.array[offset : offset + self.nbytes])
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
        return self._is_good(region, offset)

    def read_steps(
        self, engine: TransferEngine, segments: SegmentKeys, region: Region, offset: int
    ) -> Steps[bool]:
        """As `read_into`, for a driver that waits in its own way."""
        key = segments.known(self.where)
        if key is None or self.chunk_bytes or self.lease.late_s() >= 0:
            return False
        if self.nbytes > region.nbytes - offset:
            return False
        mapped = engine.in_place(self.where.node, key)
        if mapped is not None:
            if region.kind != "host" or not region.writable:
                return False
            yield from work(self.nbytes)
            return self._copy(mapped, region.array[offset : offset + self.nbytes])
        if self.nbytes > PLACE_BYTES_MAX or region.kind != "host":
            return False
        try:
            transfer = engine.read(
                self.where.node, region, key, offset, self.offset, self.nbytes,
                priority=Priority.KV_GET,
            )  # fmt: skip
            yield from settle(transfer)
        except TransferError:
            return False
        yield from work(self.nbytes)
        return self._is_good(region, offset)

    def copy_to(
        self, engine: TransferEngine, segments: SegmentKeys, target: NDArray[np.uint8]
    ) -> bool:
        """Copy the block to writable memory that no region need know, if it is mapped here.

        Args:
            engine: Has it mapped.
            segments: Keys.
            target: [nbytes] uint8.

        Returns:
            As `read_into`.
        """
        key = segments.known(self.where)
        if key is None or self.chunk_bytes or self.lease.late_s() >= 0:
            return False
        mapped = engine.in_place(self.where.node, key)
        return mapped is not None and self._copy(mapped, target)

    def is_here(self, engine: TransferEngine, segments: SegmentKeys) -> bool:
        """Tell whether the block's memory is mapped here."""
        key = segments.known(self.where)
        return key is not None and engine.in_place(self.where.node, key) is not None

    def read_bytes(self, engine: TransferEngine, segments: SegmentKeys) -> bytes | None:
        """Return the block's bytes, verified, if it is mapped here; None as `read_into`'s False."""
        key = segments.known(self.where)
        if key is None or self.chunk_bytes or self.lease.late_s() >= 0:
            return None
        mapped = engine.in_place(self.where.node, key)
        if mapped is None or not 0 <= self.offset <= len(mapped.array) - self.nbytes:
            return None
        value, found = bytes_with_checksum(mapped.array, self.offset, self.nbytes)
        mapped.read_bytes(self.nbytes)
        return value if found == self.checksum and self.lease.late_s() < 0 else None

    def _is_good(self, region: Region, offset: int) -> bool:
        if self.lease.late_s() >= 0 and not self.lease.adrift:
            return False
        found = xxhash.xxh3_64_intdigest(region.array.data[offset : offset + self.nbytes])
        return found == self.checksum

    def _copy(self, mapped: InPlace, target: NDArray[np.uint8]) -> bool:
        """Copy from memory that is mapped here, and verify what came."""
        if self.offset < 0 or self.nbytes > len(mapped.array) - self.offset:
            return False
        found = copy_with_checksum(
            target, 0, mapped.array, self.offset, self.nbytes, stream_bytes=READ_STREAM_BYTES_MIN
        )
        mapped.read_bytes(self.nbytes)
        return found == self.checksum and self.lease.late_s() < 0


def _column(number: int) -> NDArray[np.int64]:
    return np.array([number], dtype=np.int64)
