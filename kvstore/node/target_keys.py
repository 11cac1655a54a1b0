"""Keys to other nodes' segments, for the copies that the master orders."""

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
    from transfer import TransferEngine


class TargetKeys:
    """Connects to nodes and keeps the keys that they offer. Used by one thread.

    Args:
        engine: The node's.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._keys: dict[tuple[str, int], RegionKey] = {}
        self._ask_ids = itertools.count(1)
        self._offered = threading.Condition()
        self._awaited: tuple[str, int] = ("", 0)  # who is asked, and the id of the question
        self._offer: RegionKey | None = None
        self._anew = False

    def get(self, target: NodeAddress, *, deadline_s: float) -> RegionKey:
        """Return the key to a segment, connecting and asking if need be.

        Raises:
            NodeUnreachable: No connection or no offer before the deadline; or the node has
                registered with another master, and what was ordered before is void.
        """
        key = self._keys.get((target.node, target.segment))
        if key is None:
            key = self._keys[target.node, target.segment] = self._ask(target, deadline_s)
            if self._anew:
                raise _unreachable(target, "the order may be of a master that leads no more")
        return key

    def forget(self, node: str) -> None:
        """Ask anew next time: a key of this node did not work."""
        for name, segment in list(self._keys):
            if name == node:
                del self._keys[name, segment]

    def receive(self, peer: str, note: OfferSegment) -> None:
        """Take an offer; on the engine's thread. Unasked ones are ignored.

        Raises:
            ProtocolViolation: It holds no key.
        """
        key = RegionKey.decode(note.region_key)
        with self._offered:
            if (peer, note.ask_id) == self._awaited and key.owner == peer:
                self._offer, self._anew = key, note.anew
                self._offered.notify_all()

    def _ask(self, target: NodeAddress, deadline_s: float) -> RegionKey:
        ask_id = next(self._ask_ids)
        try:
            remaining_s = max(0.001, deadline_s - time.monotonic())
            peer = self._engine.connect(target.address, timeout_s=remaining_s)
            if peer.name != target.node:
                raise _unreachable(target, f"its address belongs to {peer.name} now")
            with self._offered:
                self._awaited, self._offer = (target.node, ask_id), None
            question = AskSegment(ask_id=ask_id, segment=target.segment, for_copies=True)
            self._engine.notify(target.node, encode_to_node(question))
        except TransferError as error:
            raise _unreachable(target, f"{type(error).__name__}: {error}") from error
        key = self._await_offer(deadline_s)
        if key is None:
            raise _unreachable(target, f"did not offer segment {target.segment} in time")
        return key

    def _await_offer(self, deadline_s: float) -> RegionKey | None:
        with self._offered:
            self._offered.wait_for(
                lambda: self._offer is not None, timeout=max(0.0, deadline_s - time.monotonic())
            )
            self._awaited = ("", 0)
            return self._offer


def _unreachable(target: NodeAddress, problem: str) -> NodeUnreachable:
    return NodeUnreachable(node=target.node, address=target.address, problem=problem)
