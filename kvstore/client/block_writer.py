"""Writes granted blocks into the segments they were allocated in."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import NodeUnreachable
from kvstore.wire.messages import HeldBlocks, NodeAddress
from kvstore.wire.peer_messages import Written, encode_to_node
from transfer import Priority, TransferError

if TYPE_CHECKING:
    from kvstore.client.segment_keys import SegmentKeys
    from kvstore.node.store_node import StoreNode
    from transfer import Region, Transfer, TransferEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """The blocks of one put, as columns.

    Attributes:
        keys: Their names.
        region: Where they are.
        offsets: [N] int64 in the region.
        lengths: [N] int64, bytes.
        checksums: xxh3_64 of each.
        pin: Whether they are to be pinned.
    """

    keys: Sequence[bytes]
    region: Region
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    checksums: Sequence[int]
    pin: bool


@dataclass(slots=True, kw_only=True)
class WriteResult:
    """Positions by what became of them, and the nodes that could not be reached.

    `aborted`: nothing is under way. `unsettled`: bytes may be under way for all we know.
    """

    written: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    unsettled: list[int] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)


class BlockWriter:
    """One-sided writes: one transfer per node, all at once. Thread-safe.

    Args:
        engine: Moves the bytes.
        segments: Keys to the nodes' segments.
        local_node: The node on the same engine.
    """

    def __init__(
        self, engine: TransferEngine, segments: SegmentKeys, local_node: StoreNode | None
    ) -> None:
        self._engine = engine
        self._segments = segments
        self._local_node = local_node

    def write(
        self,
        source: Source,
        nodes: Sequence[NodeAddress],
        node_idx: Sequence[int],
        offsets: Sequence[int],
        *,
        deadline_s: float,
    ) -> WriteResult:
        """Write block i to `offsets[i]` of its node's segment; -1 in `node_idx` means nowhere.

        Each node also learns what it holds now, before the master does: a node that knows of a
        block too many is harmless, one too few would lose it with the master.
        """
        where, targets = np.array(node_idx, dtype=np.int64), np.array(offsets, dtype=np.int64)
        result = WriteResult()
        under_way: list[tuple[NodeAddress, list[int], Transfer]] = []
        for idx, node in enumerate(nodes):
            theirs = np.flatnonzero(where == idx)
            try:
                key = self._segments.get(node, deadline_s=deadline_s)
            except NodeUnreachable as error:
                self._lose(node, error, result)
                result.aborted += theirs.tolist()
                continue
            try:
                transfer = self._engine.write(
                    node.node,
                    source.region,
                    key,
                    source.offsets[theirs],
                    targets[theirs],
                    source.lengths[theirs],
                    priority=Priority.KV_PUT,
                    timeout_s=max(0.001, deadline_s - time.monotonic()),
                )
            except TransferError as error:  # raised at once: nothing is under way
                self._lose(node, error, result)
                result.aborted += theirs.tolist()
                continue
            under_way.append((node, theirs.tolist(), transfer))
        for node, positions, transfer in under_way:
            try:
                transfer.wait(max(0.001, deadline_s - time.monotonic()))
                self._tell(node, source, positions, targets)
            except TransferError as error:
                self._lose(node, error, result)
                result.unsettled += positions
                continue
            result.written += positions
        return result

    def _tell(
        self,
        node: NodeAddress,
        source: Source,
        positions: list[int],
        targets: NDArray[np.int64],
    ) -> None:
        held = HeldBlocks(
            keys=[source.keys[i] for i in positions],
            offsets=targets[positions].tolist(),
            lengths=source.lengths[positions].tolist(),
            checksums=[source.checksums[i] for i in positions],
            pinned=[source.pin] * len(positions),
        )
        payload = encode_to_node(Written(held))
        if node.node == self._engine.name and self._local_node is not None:
            self._local_node.on_notify(node.node, payload)
        else:
            self._engine.notify(node.node, payload)

    def _lose(self, node: NodeAddress, error: Exception, result: WriteResult) -> None:
        logger.info("blocks for %s not written: %s", node.node, error)
        self._segments.forget(node.node)
        result.lost_nodes.append(node.node)
