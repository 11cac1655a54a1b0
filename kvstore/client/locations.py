"""Where leased blocks lie, as columns ready for one transfer call per node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.client.lease import Lease
from kvstore.wire.messages import Located, NodeAddress

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hit:
    """Blocks that a lookup found, leased to the caller until it releases them.

    Of a prefix lookup they are the leading run of the keys asked for; else those that are there.

    Attributes:
        keys: Keys of the blocks, in the order asked for.
        positions: [num_blocks] int64, where each stood among the keys asked for.
        lease: How long the bytes stay in place.
        nodes: The segments that hold blocks of the hit.
        node_idx: [num_blocks] int64, index into `nodes`.
        offsets: [num_blocks] int64, in the segment.
        lengths: [num_blocks] int64, bytes of payload of each block.
        checksums: [num_blocks] uint64, xxh3_64 of each block.
        chunk_bytes: [num_blocks] int64; 0: no part table.
        tables: Part tables read so far and verified, by block.
    """

    keys: tuple[bytes, ...]
    positions: Ints
    lease: Lease
    nodes: tuple[NodeAddress, ...]
    node_idx: Ints
    offsets: Ints
    lengths: Ints
    checksums: NDArray[np.uint64]
    chunk_bytes: Ints
    tables: dict[int, NDArray[np.uint8]] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """How many were found."""
        return len(self.keys)

    @property
    def lease_id(self) -> int:
        """The lease's number; 0 if nothing was found."""
        return self.lease.lease_id

    @property
    def deadline_s(self) -> float:
        """End of the lease on this process's monotonic clock."""
        return self.lease.deadline_s

    @classmethod
    def from_reply(cls, keys: Sequence[bytes], reply: Located, *, asked_s: float) -> Hit:
        """Read the master's reply to a lookup that was sent at `asked_s`."""
        where = np.array(reply.node_idx, dtype=np.int64)
        found = np.flatnonzero(where >= 0)
        offsets = np.array(reply.offsets, dtype=np.int64)
        lengths = np.array(reply.lengths, dtype=np.int64)
        checksums = np.array(reply.checksums, dtype=np.uint64)
        chunks = np.zeros(len(where), dtype=np.int64)
        if reply.chunk_bytes:
            chunks = np.array(reply.chunk_bytes, dtype=np.int64)
        names: Sequence[bytes] = keys[: len(where)]
        if len(found) < len(where):
            where, offsets, lengths, chunks = (
                column[found] for column in (where, offsets, lengths, chunks)
            )
            checksums = checksums[found]
            names = [names[row] for row in found.tolist()]
        return cls(
            keys=tuple(names),
            positions=found,
            lease=Lease(reply.lease_id, asked_s + reply.lease_s),
            nodes=tuple(reply.nodes),
            node_idx=where,
            offsets=offsets,
            lengths=lengths,
            checksums=checksums,
            chunk_bytes=chunks,
        )
