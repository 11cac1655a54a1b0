"""The store as its users see it: look up, copy in, put. Bytes move one-sided, past the master.

lookup_prefix   keys ─▶ master: longest run that is there, leased in the same step
get_into        run ─▶ one read per node into the caller's region ─▶ checksums
put             allocate at the master ─▶ one write per node ─▶ commit at the master
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.checksum import block_checksums
from kvstore.client.block_reader import BlockReader, Copied
from kvstore.client.block_writer import BlockWriter, Source
from kvstore.client.locations import PrefixHit
from kvstore.client.segment_keys import SegmentKeys
from kvstore.errors import KVStoreError, MasterUnavailable
from kvstore.wire import messages as m
from kvstore.wire.master_link import MasterLink
from kvstore.wire.messages import PutOutcome
from kvstore.wire.peer_messages import TO_CLIENT, decode_to_client
from transfer import TransferError

if TYPE_CHECKING:
    from configs.schema import KVStoreConfig
    from kvstore.node.store_node import StoreNode
    from transfer import Region, TransferEngine

logger = logging.getLogger(__name__)

AVOID_S: Final = 5.0  # how long a node that could not be reached is left alone
ABANDONED_MAX: Final = 1024

Offsets = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatistics:
    """Counts since the client was made."""

    hit_blocks: int
    missed_blocks: int
    read_blocks: int
    corrupt_blocks: int
    unreachable_blocks: int
    stored_blocks: int
    skipped_blocks: int
    failed_blocks: int


class StoreClient:
    """A process's access to the pool. All methods are thread-safe and have deadlines.

    The owner of the engine chains `on_notify` into its own callback.

    Args:
        engine: The process's engine, open while the client is used.
        master_address: From `MasterServer.address`.
        config: The store's knobs.
        secret: The cluster secret.
        local_node: The store node on the same engine, if there is one.
    """

    def __init__(
        self,
        engine: TransferEngine,
        master_address: str,
        config: KVStoreConfig,
        *,
        secret: bytes,
        local_node: StoreNode | None = None,
    ) -> None:
        self._name = engine.name
        self._timeout_s = config.request_timeout_s
        self._link = MasterLink(
            master_address,
            secret=secret,
            identity=f"{engine.name}.client",
            timeout_s=config.request_timeout_s,
        )
        self._segments = SegmentKeys(engine, local_node)
        self._reader = BlockReader(engine, self._segments)
        self._writer = BlockWriter(engine, self._segments, local_node)
        self._batches = itertools.count(1)
        self._lock = threading.Lock()
        self._avoided: dict[str, float] = {}  # node -> until when
        self._abandoned: list[int] = []
        self._counts = dict.fromkeys(ClientStatistics.__dataclass_fields__, 0)

    def close(self) -> None:
        """Stop using the store. Running leases end by themselves."""
        self._link.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def use_master(self, address: str) -> None:
        """Ask another master from now on."""
        self._link.redirect(address)

    def on_notify(self, peer: str, payload: bytes) -> bool:
        """Take a note if it is for a store client; short enough for the engine's thread.

        Returns:
            True if the note was for us.
        """
        if not payload.startswith(TO_CLIENT):
            return False
        try:
            self._segments.receive(peer, decode_to_client(payload))
        except (msgspec.MsgspecError, TransferError) as error:
            logger.warning("malformed note from %s: %s", peer, error)
        return True

    # -- reading ------------------------------------------------------------------------------

    def lookup_prefix(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> PrefixHit:
        """Find the longest leading run of `keys` that is in the pool, and lease it.

        The caller releases the hit when it has read what it wants; else the lease runs out.

        Raises:
            MasterUnavailable: No answer in time (retryable); treat it as a miss.
            Fenced: This incarnation is out of the cluster.
        """
        asked_s = time.monotonic()
        asked = list(keys[: m.KEYS_MAX])
        request = m.Lookup(self._name, asked, self._avoid())
        reply = self._link.ask(request, m.Located, timeout_s=timeout_s)
        hit = PrefixHit.from_reply(asked, reply, asked_s=asked_s)
        self._count(hit_blocks=hit.num_blocks, missed_blocks=len(keys) - hit.num_blocks)
        return hit

    def get_into(
        self, hit: PrefixHit, region: Region, offsets: Offsets, *, timeout_s: float | None = None
    ) -> int:
        """Copy the blocks of a hit, block i to `offsets[i]` of the region.

        Every block's checksum is verified after the copy. Blocks that are bad or out of reach are
        reported to the master; what was copied after the first of them is of no use.

        Args:
            hit: From `lookup_prefix`, its lease still running.
            region: Target.
            offsets: [num_blocks] byte offsets; block i needs `hit.lengths[i]` bytes there.
            timeout_s: Default: the configured one.

        Returns:
            How many leading blocks are there, whole and verified.

        Raises:
            LeaseExpired: The lease ended before the copy did (retryable: look up again).
            ValueError: The offsets do not fit the hit or the region.
        """
        if hit.num_blocks == 0:
            return 0
        targets = np.asarray(offsets, dtype=np.int64)
        _check_ranges(region, targets, hit.lengths)
        copied = self._reader.copy(hit, region, targets, deadline_s=self._deadline(timeout_s))
        self._count(read_blocks=copied.num_good)
        if copied.num_good < hit.num_blocks:
            self._report(hit, copied)
        return copied.num_good

    def release(self, hit: PrefixHit) -> None:
        """End the lease of a hit. An unreachable master is no error: the lease runs out."""
        if hit.lease_id == 0:
            return
        try:
            self._link.ask(m.Release(self._name, [hit.lease_id]), m.Done)
        except KVStoreError as error:
            logger.debug("lease %s not released: %s", hit.lease_id, error)

    def exists(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bool]:
        """Tell which blocks are in the pool now. Raises as `lookup_prefix`."""
        return self._link.ask(m.Exists(list(keys)), m.Present, timeout_s=timeout_s).flags

    # -- writing ------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[bytes],
        region: Region,
        offsets: Offsets,
        nbytes_each: int | Sequence[int] | npt.NDArray[np.int64],
        *,
        pin: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[PutOutcome, ...]:
        """Store blocks, each whole or not at all, on other nodes than this one if there are any.

        A block that is there already is not sent again (`EXISTS`, and it is pinned if asked for);
        other bytes under an existing key are not stored (`CONFLICT`, the first stay). A key that
        is being written, by anybody or earlier in this very batch, is `IN_PROGRESS`. The
        source bytes must not change until the call returns.

        Args:
            keys: 16 bytes each.
            region: Source.
            offsets: [N] byte offsets in the region.
            nbytes_each: Bytes of every block, or [N] bytes of each.
            pin: Never evict these blocks.
            timeout_s: For the whole call; default: the configured one.

        Returns:
            What became of each block, in order; never `GRANTED`.

        Raises:
            MasterUnavailable: It did not answer (retryable). What it granted is given back.
            Fenced: This incarnation is out of the cluster.
            ValueError: Columns of different lengths, or pieces outside of the region.
        """
        if not keys:
            return ()
        deadline_s = self._deadline(timeout_s)
        starts = np.asarray(offsets, dtype=np.int64)
        lengths = np.broadcast_to(np.asarray(nbytes_each, dtype=np.int64), (len(keys),))
        _check_ranges(region, starts, lengths)
        source = Source(
            keys=keys,
            region=region,
            offsets=starts,
            lengths=lengths,
            checksums=block_checksums(region.tensor.numpy(), starts, lengths),
            pin=pin,
        )
        batch = next(self._batches)
        try:
            outcomes = self._put(batch, source, deadline_s)
        except MasterUnavailable:
            # Whatever of this batch the master granted or will still grant, we write it no more.
            self._abandon(batch)
            raise
        stored = outcomes.count(PutOutcome.STORED)
        failed = outcomes.count(PutOutcome.FAILED)
        self._count(
            stored_blocks=stored, failed_blocks=failed, skipped_blocks=len(keys) - stored - failed
        )
        return tuple(outcomes)

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> int:
        """Forget blocks, pinned ones too; return how many were there. Raises as `lookup_prefix`."""
        return self._link.ask(m.Remove(list(keys)), m.Done, timeout_s=timeout_s).count

    # -- the cluster --------------------------------------------------------------------------

    def fence(self, incarnations: Sequence[str]) -> None:
        """Tell the master who is not in the view any more: they may still run, and write."""
        self._link.ask(m.Fence(list(incarnations), dead=False), m.Done)

    def confirm_dead(self, incarnations: Sequence[str]) -> None:
        """Tell the master who certainly runs no more: what they were writing can be reused."""
        self._link.ask(m.Fence(list(incarnations), dead=True), m.Done)

    def master_statistics(self) -> m.MasterStatistics:
        """Return the pool's figures. Raises as `lookup_prefix`."""
        return self._link.ask(m.Observe(), m.MasterStatistics)

    def statistics(self) -> ClientStatistics:
        """Return this client's counts."""
        with self._lock:
            return ClientStatistics(**self._counts)

    # -- inside -------------------------------------------------------------------------------

    def _put(self, batch: int, source: Source, deadline_s: float) -> list[PutOutcome]:
        with self._lock:
            abandoned = list(self._abandoned)
        request = m.Allocate(
            client=self._name,
            batch=batch,
            keys=list(source.keys),
            lengths=source.lengths.tolist(),
            checksums=list(source.checksums),
            pin=m.Pin.HARD if source.pin else m.Pin.NONE,
            avoid=self._avoid(),
            abandoned=abandoned,
        )
        granted = self._link.ask(request, m.Allocated, timeout_s=_remaining(deadline_s))
        with self._lock:
            self._abandoned = [i for i in self._abandoned if i not in abandoned]
        outcomes = list(granted.outcomes)
        if not granted.nodes:
            return outcomes
        deadline_s = min(deadline_s, time.monotonic() + granted.put_s / 2)
        result = self._writer.write(
            source, granted.nodes, granted.node_idx, granted.offsets, deadline_s=deadline_s
        )
        self._shun(result.lost_nodes)
        finish = m.Finish(
            client=self._name,
            batch=batch,
            committed=result.written,
            aborted=result.aborted,
            unsettled=result.unsettled,
        )
        # Its own deadline: the bytes are there, and giving up now would waste them.
        finished = self._link.ask(finish, m.Finished)
        for position in (*result.aborted, *result.unsettled):
            outcomes[position] = PutOutcome.FAILED
        for position, stored in zip(result.written, finished.stored, strict=True):
            outcomes[position] = PutOutcome.STORED if stored else PutOutcome.FAILED
        return outcomes

    def _report(self, hit: PrefixHit, copied: Copied) -> None:
        self._shun(copied.lost_nodes)
        bad = [*copied.corrupt, *copied.unreached]
        self._count(corrupt_blocks=len(copied.corrupt), unreachable_blocks=len(copied.unreached))
        logger.warning(
            "of %s blocks, %s are corrupt and %s out of reach (nodes %s)",
            hit.num_blocks,
            len(copied.corrupt),
            len(copied.unreached),
            copied.lost_nodes,
        )
        request = m.ReportBad(
            client=self._name,
            keys=[hit.keys[i] for i in bad],
            nodes=[hit.nodes[hit.node_idx[i]].node for i in bad],
            offsets=hit.offsets[bad].tolist(),
            corrupt=[True] * len(copied.corrupt) + [False] * len(copied.unreached),
        )
        try:
            self._link.ask(request, m.Done)
        except KVStoreError as error:
            logger.warning("bad blocks not reported: %s", error)

    def _abandon(self, batch: int) -> None:
        with self._lock:
            self._abandoned = [*self._abandoned, batch][-ABANDONED_MAX:]

    def _avoid(self) -> list[str]:
        now = time.monotonic()
        with self._lock:
            self._avoided = {node: t for node, t in self._avoided.items() if t > now}
            return list(self._avoided)

    def _shun(self, nodes: Sequence[str]) -> None:
        until_s = time.monotonic() + AVOID_S
        with self._lock:
            self._avoided.update(dict.fromkeys(nodes, until_s))

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)


def _remaining(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())


def _check_ranges(
    region: Region, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> None:
    if offsets.shape != lengths.shape:
        raise ValueError(f"{len(lengths)} blocks, but offsets of shape {offsets.shape}")
    if int(lengths.min()) <= 0:
        raise ValueError("a block must have at least one byte")
    if int(offsets.min()) < 0 or int((offsets + lengths).max()) > region.nbytes:
        raise ValueError(f"a block lies outside of the region of {region.nbytes} bytes")
