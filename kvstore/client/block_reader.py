"""Copies leased blocks into the caller's region and tells the good ones from the bad."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.checksum import block_checksums
from kvstore.client.locations import PrefixHit
from kvstore.errors import LeaseExpired, NodeUnreachable
from transfer import Priority, TransferError

if TYPE_CHECKING:
    from kvstore.client.segment_keys import SegmentKeys
    from transfer import Region, Transfer, TransferEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What a copy brought.

    Attributes:
        num_good: Length of the leading run of blocks whose bytes are right.
        corrupt: Positions whose bytes arrived and do not match their checksum.
        unreached: Positions whose bytes could not be read.
        lost_nodes: Names of the nodes that could not be read from.
    """

    num_good: int
    corrupt: tuple[int, ...]
    unreached: tuple[int, ...]
    lost_nodes: tuple[str, ...]


class BlockReader:
    """One-sided reads: one transfer per node, all at once. Thread-safe.

    Args:
        engine: Moves the bytes.
        segments: Keys to the nodes' segments.
    """

    def __init__(self, engine: TransferEngine, segments: SegmentKeys) -> None:
        self._engine = engine
        self._segments = segments

    def copy(
        self, hit: PrefixHit, region: Region, offsets: NDArray[np.int64], *, deadline_s: float
    ) -> Copied:
        """Copy block i of the run to `offsets[i]` of the region and verify it.

        The lease is looked at before and after. Between the two the bytes cannot have moved; if
        the later look finds it over, they may have, and nothing of the copy counts.

        Raises:
            LeaseExpired: See above; the target bytes are garbage.
        """
        _check_lease(hit)
        reached = np.ones(hit.num_blocks, dtype=bool)
        lost: list[str] = []

        def lose(node_idx: int) -> None:
            name = hit.nodes[node_idx].node
            reached[hit.node_idx == node_idx] = False
            lost.append(name)
            self._segments.forget(name)

        reads: list[tuple[int, Transfer]] = []
        for node_idx in range(len(hit.nodes)):
            try:
                reads.append((node_idx, self._start(hit, node_idx, region, offsets, deadline_s)))
            except (NodeUnreachable, TransferError):
                lose(node_idx)
        for node_idx, read in reads:
            try:
                read.wait(max(0.001, deadline_s - time.monotonic()))
            except TransferError:
                lose(node_idx)
        _check_lease(hit)
        return _judge(hit, region, offsets, reached, tuple(lost))

    def _start(
        self,
        hit: PrefixHit,
        node_idx: int,
        region: Region,
        offsets: NDArray[np.int64],
        deadline_s: float,
    ) -> Transfer:
        node = hit.nodes[node_idx]
        theirs = np.flatnonzero(hit.node_idx == node_idx)
        key = self._segments.get(node, deadline_s=deadline_s)
        return self._engine.read(
            node.node,
            region,
            key,
            offsets[theirs],
            hit.offsets[theirs],
            hit.lengths[theirs],
            priority=Priority.KV_GET,
            timeout_s=max(0.001, deadline_s - time.monotonic()),
        )


def _judge(
    hit: PrefixHit,
    region: Region,
    offsets: NDArray[np.int64],
    reached: NDArray[np.bool_],
    lost: tuple[str, ...],
) -> Copied:
    arrived = np.flatnonzero(reached)
    found = block_checksums(region.tensor.numpy(), offsets[arrived], hit.lengths[arrived])
    pairs = zip(arrived.tolist(), found, strict=True)
    corrupt = tuple(i for i, checksum in pairs if checksum != hit.checksums[i])
    unreached = tuple(np.flatnonzero(~reached).tolist())
    return Copied(
        num_good=min((*corrupt, *unreached, hit.num_blocks)),
        corrupt=corrupt,
        unreached=unreached,
        lost_nodes=lost,
    )


def _check_lease(hit: PrefixHit, clock: Callable[[], float] = time.monotonic) -> None:
    late_s = clock() - hit.deadline_s
    if late_s >= 0:
        raise LeaseExpired(lease_id=hit.lease_id, late_s=late_s)
