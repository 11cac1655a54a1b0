"""A client's keys to the segments of store nodes, asked for when first needed."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

from kvstore.errors import NodeUnreachable
from kvstore.wire.messages import NodeAddress
from kvstore.wire.peer_messages import AskSegment, OfferSegment, encode_to_node
from transfer import RegionKey, TransferError

if TYPE_CHECKING:
    from kvstore.node.store_node import StoreNode
    from transfer import TransferEngine


class SegmentKeys:
    """Connects to nodes and keeps the keys they offer. Thread-safe.

    Args:
        engine: The client's engine.
        local_node: The node on the same engine, which is asked directly.
    """

    def __init__(self, engine: TransferEngine, local_node: StoreNode | None) -> None:
        self._engine = engine
        self._local_node = local_node
        self._keys: dict[str, RegionKey] = {}
        self._offered = threading.Condition()
        self._asking = threading.Lock()
        self._ask_ids = itertools.count(1)
        self._awaited = 0  # id of the question under way, 0 if none

    def get(self, node: NodeAddress, *, deadline_s: float) -> RegionKey:
        """Return the key to a node's segment, connecting and asking if need be.

        Args:
            node: Whose segment.
            deadline_s: Of the monotonic clock.

        Raises:
            NodeUnreachable: No connection or no offer before the deadline.
        """
        key = self._keys.get(node.node)
        if key is not None:
            return key
        if not self._asking.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise _unreachable(node, "another thread is still asking for a segment")
        try:
            key = self._keys.get(node.node)
            return key if key is not None else self._ask(node, deadline_s)
        finally:
            self._asking.release()

    def forget(self, node: str) -> None:
        """Ask anew next time: the key did not work."""
        with self._offered:
            self._keys.pop(node, None)

    def receive(self, peer: str, note: OfferSegment) -> None:
        """Take an offer; called on the engine's thread. Unasked ones are ignored."""
        key = RegionKey.decode(note.region_key)
        with self._offered:
            if note.ask_id == self._awaited and key.owner == peer:
                self._keys[peer] = key
                self._offered.notify_all()

    def _ask(self, node: NodeAddress, deadline_s: float) -> RegionKey:
        if node.node == self._engine.name:
            return self._ask_local(node)
        ask_id = next(self._ask_ids)
        try:
            remaining_s = max(0.001, deadline_s - time.monotonic())
            peer = self._engine.connect(node.address, timeout_s=remaining_s)
            if peer.name != node.node:
                raise _unreachable(node, f"its address belongs to {peer.name} now")
            with self._offered:
                self._awaited = ask_id
            self._engine.notify(node.node, encode_to_node(AskSegment(ask_id=ask_id)))
        except TransferError as error:
            raise _unreachable(node, f"{type(error).__name__}: {error}") from error
        with self._offered:
            self._offered.wait_for(
                lambda: node.node in self._keys, timeout=max(0.0, deadline_s - time.monotonic())
            )
            self._awaited = 0
            key = self._keys.get(node.node)
        if key is None:
            raise _unreachable(node, "it did not offer its segment in time")
        return key

    def _ask_local(self, node: NodeAddress) -> RegionKey:
        if self._local_node is None:
            raise _unreachable(node, "it is this process, but its node was not given")
        key = self._local_node.offer_to(node.node)
        with self._offered:
            self._keys[node.node] = key
        return key


def _unreachable(node: NodeAddress, problem: str) -> NodeUnreachable:
    return NodeUnreachable(node=node.node, address=node.address, problem=problem)
