"""One block as the node that holds it knows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.checksum import table_bytes
from kvstore.wire.messages import HeldBlocks

ValueT = TypeVar("ValueT")


@dataclass(slots=True, eq=False, kw_only=True)
class IndexedBlock:
    """What a writer said lies at `[offset, end)`. Two of them are never equal: see `is`.

    Attributes:
        offset: From the start of the segment.
        length: Bytes of payload.
        key: Its name.
        checksum: As in `HeldBlocks`.
        pinned: Hard pin.
        chunk_bytes: Of its part table; 0 if it has none.
        tenant: Who is charged for it.
        group: What it goes with.
        stamp: When it was told, as in `HeldBlocks`.
        verified: Whether its bytes were seen to be right in this life of the node.
    """

    offset: int
    length: int
    key: bytes
    checksum: int
    pinned: bool = False
    chunk_bytes: int = 0
    tenant: str = ""
    group: str = ""
    stamp: int = 0
    verified: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes with the part table."""
        return self.length + table_bytes(self.length, self.chunk_bytes)

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.nbytes

    def is_copy_of(self, other: IndexedBlock) -> bool:
        """Whether both hold the same bytes under the same name."""
        mine = (self.key, self.length, self.checksum, self.chunk_bytes)
        return mine == (other.key, other.length, other.checksum, other.chunk_bytes)

    def fits(self, nbytes: int) -> bool:
        """Whether it can lie in a segment of this size at all."""
        numbers_make_sense = (
            self.offset >= 0 and self.length > 0 and 0 <= self.chunk_bytes < 1 << 63
        )
        return numbers_make_sense and self.end <= nbytes and 0 <= self.checksum < 1 << 64


def blocks_of(held: HeldBlocks, told_ns: int = 0) -> Iterator[IndexedBlock]:
    """Read columns; what has no place in all of the required ones is left out.

    Args:
        held: The columns.
        told_ns: The stamp of all of them, if they have none.
    """
    required: tuple[Sequence[object], ...] = (
        held.keys,
        held.offsets,
        held.lengths,
        held.checksums,
    )
    count = min(len(column) for column in required)
    pinned = _filled(held.pinned, count, default=False)
    chunks = _filled(held.chunk_bytes, count, default=0)
    tenants = _filled(held.tenants, count, default="")
    groups = _filled(held.groups, count, default="")
    stamps = _filled(held.stamps, count, default=told_ns)
    for i in range(count):
        yield IndexedBlock(
            offset=held.offsets[i],
            length=held.lengths[i],
            key=held.keys[i],
            checksum=held.checksums[i],
            pinned=pinned[i],
            chunk_bytes=chunks[i],
            tenant=tenants[i],
            group=groups[i],
            stamp=stamps[i],
        )


def columns_of(blocks: Iterable[IndexedBlock]) -> HeldBlocks:
    """Write columns; those that are the default for all stay empty."""
    listed = list(blocks)
    chunks = [block.chunk_bytes for block in listed]
    tenants = [block.tenant for block in listed]
    groups = [block.group for block in listed]
    stamps = [block.stamp for block in listed]
    return HeldBlocks(
        keys=[block.key for block in listed],
        offsets=[block.offset for block in listed],
        lengths=[block.length for block in listed],
        checksums=[block.checksum for block in listed],
        pinned=[block.pinned for block in listed],
        chunk_bytes=chunks if any(chunks) else [],
        tenants=tenants if any(tenants) else [],
        groups=groups if any(groups) else [],
        stamps=stamps if any(stamps) else [],
    )


def _filled(column: Sequence[ValueT], count: int, *, default: ValueT) -> Sequence[ValueT]:
    return column if len(column) >= count else [default] * count
