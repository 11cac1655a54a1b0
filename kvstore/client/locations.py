"""Where leased blocks lie, as columns ready for one transfer call per node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.wire.messages import Located, NodeAddress


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixHit:
    """The leading run of the keys of a lookup that is in the pool, leased to the caller.

    Attributes:
        keys: Keys of the run, in order.
        lease_id: 0 if the run is empty.
        deadline_s: End of the lease on this process's monotonic clock, on the safe side.
        nodes: The nodes that hold blocks of the run.
        node_idx: [num_blocks] int64, index into `nodes`.
        offsets: [num_blocks] int64, in the node's segment.
        lengths: [num_blocks] int64, bytes of each block.
        checksums: xxh3_64 of each block.
    """

    keys: tuple[bytes, ...]
    lease_id: int
    deadline_s: float
    nodes: tuple[NodeAddress, ...]
    node_idx: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    checksums: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Length of the run."""
        return len(self.keys)

    @classmethod
    def from_reply(cls, keys: list[bytes], reply: Located, *, asked_s: float) -> PrefixHit:
        """Read the master's reply to a lookup that was sent at `asked_s`."""
        return cls(
            keys=tuple(keys[: len(reply.offsets)]),
            lease_id=reply.lease_id,
            deadline_s=asked_s + reply.lease_s,
            nodes=tuple(reply.nodes),
            node_idx=np.array(reply.node_idx, dtype=np.int64),
            offsets=np.array(reply.offsets, dtype=np.int64),
            lengths=np.array(reply.lengths, dtype=np.int64),
            checksums=tuple(reply.checksums),
        )
