"""Places of blocks that are asked for again and again: read without asking the master.

    get ─▶ known, and its lease runs ─▶ one-sided read ─▶ checksum ─▶ lease still runs ─▶ value
        └▶ else: lookup. The second within a lease's time keeps the lease instead of releasing it

A lease says that the bytes stay in place, and the checksum that they are the right ones, so what
is read is what the key meant when it was looked up. The price: a block that somebody else removes
is still found here until the lease ends, and is not evicted before. Both are bounded, by `lease_s`
and by `HOT_BYTES_MAX`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from kvstore.client.locations import Hit
from transfer import Priority, TransferError

if TYPE_CHECKING:
    from kvstore.client.lease import Lease
    from kvstore.client.lease_keeper import LeaseKeeper
    from kvstore.client.segment_keys import SegmentKeys
    from kvstore.client.staging import Staging
    from kvstore.wire.messages import NodeAddress
    from transfer import TransferEngine

HOT_BLOCKS_MAX: Final = 1024
HOT_BYTES_MAX: Final = 16 << 20
HOT_BLOCK_BYTES_MAX: Final = 256 << 10  # larger ones: asking the master is little beside the copy
SEEN_MAX: Final = 8192


class _Hot(NamedTuple):
    where: NodeAddress
    offset: int
    nbytes: int
    checksum: int
    lease: Lease


class HotBlocks:
    """Thread-safe.

    Args:
        engine: Moves the bytes.
        segments: Keys to the nodes' segments.
        staging: Where they are read to.
        leases: Releases leases that are not needed any more.
    """

    def __init__(
        self,
        engine: TransferEngine,
        segments: SegmentKeys,
        staging: Staging,
        leases: LeaseKeeper,
    ) -> None:
        self._engine = engine
        self._segments = segments
        self._staging = staging
        self._leases = leases
        self._lock = threading.Lock()
        self._hot: OrderedDict[bytes, _Hot] = OrderedDict()
        self._nbytes = 0
        self._seen: OrderedDict[bytes, float] = OrderedDict()  # key -> end of its last lease

    def read(self, key: bytes) -> bytes | None:
        """Return a block's bytes if its place is known and all is well, else None."""
        hot = self._hot.get(key)
        if hot is None:
            return None
        region_key = self._segments.known(hot.where)
        if region_key is None or hot.lease.late_s() >= 0:
            self.forget([key])
            return None
        with self._staging.borrow(hot.nbytes) as region:
            try:
                self._engine.read(
                    hot.where.node, region, region_key, 0, hot.offset, hot.nbytes,
                    priority=Priority.KV_GET,
                ).wait()  # fmt: skip
            except TransferError:
                self.forget([key])  # the slow way finds out what is wrong, and reports it
                return None
            value = region.array[: hot.nbytes].tobytes()
        if hot.lease.late_s() >= 0 or xxhash.xxh3_64_intdigest(value) != hot.checksum:
            self.forget([key])
            return None
        return value

    def offer(self, key: bytes, hit: Hit) -> None:
        """Take the lease of a block that was just read, to keep it or to release it soon."""
        assert hit.num_blocks == 1, hit
        nbytes, now = int(hit.lengths[0]), time.monotonic()
        with self._lock:
            again = self._seen.pop(key, 0.0) > now
            self._seen[key] = hit.deadline_s
            if len(self._seen) > SEEN_MAX:
                self._seen.popitem(last=False)
        if not again or nbytes > HOT_BLOCK_BYTES_MAX or hit.chunk_bytes[0]:
            self._leases.drop(hit.lease)
            return
        hot = _Hot(
            where=hit.nodes[int(hit.node_idx[0])],
            offset=int(hit.offsets[0]),
            nbytes=nbytes,
            checksum=hit.checksums[0],
            lease=hit.lease,
        )
        self.forget([key])
        with self._lock:
            self._hot[key] = hot
            self._nbytes += nbytes
            over = []
            while len(self._hot) > HOT_BLOCKS_MAX or self._nbytes > HOT_BYTES_MAX:
                _, oldest = self._hot.popitem(last=False)
                self._nbytes -= oldest.nbytes
                over.append(oldest)
        for oldest in over:
            self._leases.drop(oldest.lease)

    def forget(self, keys: Iterable[bytes], *, everything: bool = False) -> None:
        """Ask the master again for these."""
        gone = []
        with self._lock:
            for key in list(self._hot) if everything else keys:
                hot = self._hot.pop(key, None)
                if hot is not None:
                    self._nbytes -= hot.nbytes
                    gone.append(hot)
        for hot in gone:
            self._leases.drop(hot.lease)

    def close(self) -> None:
        """Release everything."""
        self.forget((), everything=True)
