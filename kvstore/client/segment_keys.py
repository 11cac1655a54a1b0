"""A client's keys to the segments of store nodes, asked for when first needed.

Who has a key is asked by the node, when another master has come, whether it is at rest there: see
`kvstore/client/writes_under_way.py`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvstore import mailbox
from kvstore.client.writes_under_way import Target, WritesUnderWay
from kvstore.errors import NodeUnreachable
from kvstore.wire.left_notes import Row, columns_of_rows, write_note, write_row
from kvstore.wire.messages import Medium, NodeAddress
from kvstore.wire.peer_messages import (
    AskAtRest,
    AskSegment,
    AtRest,
    Leader,
    Leaving,
    NodeNote,
    OfferSegment,
    Unwritten,
    Written,
    encode_to_node,
)
from kvstore.wire.standing import MasterRecord
from transfer import NOTE_BYTES_MAX, Priority, RegionKey, TransferError, allocate

if TYPE_CHECKING:
    from kvstore.node.store_node import StoreNode
    from transfer import Memory, Region, Transfer, TransferEngine
    from transfer.memory.copy_on_write import CopyOnWrite
    from transfer.prepared import InPlace

logger = logging.getLogger(__name__)


class SegmentKeys:
    """Connects to nodes and keeps the keys they offer. Thread-safe.

    A node that does not answer keeps only those waiting who want its own segments.

    Args:
        engine: The client's engine.
        local_node: The node on the same engine, which is asked directly.

    Attributes:
        under_way: What the client may still be writing.
    """

    def __init__(self, engine: TransferEngine, local_node: StoreNode | None) -> None:
        self._engine = engine
        self._local_node = local_node
        self.under_way = WritesUnderWay()
        self._on_leader: Callable[[MasterRecord], None] = _ignore
        self._keys: dict[Target, RegionKey] = {}
        self._outboxes: dict[Target, mailbox.Outbox] = {}
        self._mailboxes: dict[Target, RegionKey] = {}  # offered, and not looked at yet
        self._clock = mailbox.clock_name()
        self._stamped: set[Target] = set()  # with a mailbox, or one that is looked at: say when
        self._noted: set[Target] = set()  # notes go with writes, if these carry any
        self._offered = threading.Condition()
        self._nothing: tuple[Region, Memory] | None = None  # see `_one_byte`
        self._asking: dict[Target, threading.Lock] = {}
        self._ask_ids = itertools.count(1)
        self._awaited: dict[int, Target] = {}
        if local_node is not None:
            local_node.meet_writer(self.under_way, self._heed)

    def on_leader(self, meet: Callable[[MasterRecord], None]) -> None:
        """Name who is told of masters that nodes have registered with. It must not wait."""
        self._on_leader = meet

    def close(self) -> None:
        """Give the keys back, if nothing is under way any more for certain. Idempotent."""
        if self._local_node is not None:
            self._local_node.part_with(self.under_way)
        with self._offered:
            targets, self._keys, self._outboxes = list(self._keys), {}, {}
            nothing, self._nothing = self._nothing, None
        if nothing is not None:
            self._engine.release(nothing[0])
            nothing[1].close()
        for node, segment in targets:
            if node != self._engine.name and self.under_way.is_at_rest((node, segment)):
                self._note(node, Leaving(segment))

    def known(self, where: NodeAddress) -> RegionKey | None:
        """Return the key to a segment if it need not be asked for."""
        return self._keys.get((where.node, where.segment))

    def memory(self, where: NodeAddress) -> NDArray[np.uint8] | None:
        """Return a segment's memory if it is this process's, or mapped here already: DRAM alone."""
        if where.medium is not Medium.DRAM:
            return None
        if where.node == self._engine.name and self._local_node is not None:
            return self._local_node.memory(where.segment)
        mapped = self._mapped(where)
        return None if mapped is None else mapped.array

    def copy_on_write(self, where: NodeAddress) -> CopyOnWrite | None:
        """As `memory`, for who might write into it; never this process's own. Raises OSError."""
        mapped = self._mapped(where)
        return None if mapped is None else mapped.copy_on_write()

    def _mapped(self, where: NodeAddress) -> InPlace | None:
        key = self.known(where)
        return None if key is None else self._engine.in_place(where.node, key)

    def map(self, where: NodeAddress, key: RegionKey, offset: int) -> Transfer | None:
        """Begin to have a segment's memory mapped here; None if it cannot be.

        Args:
            where: Which segment.
            key: To it.
            offset: Of a byte in it.

        Raises:
            TransferError: It is not reached.
        """
        if (
            where.medium is not Medium.DRAM
            or self._engine.peer(where.node).backend != "shared_memory"
        ):
            return None
        return self._engine.read(where.node, self._one_byte(), key, 0, offset, 1)

    def get(self, where: NodeAddress, *, deadline_s: float) -> RegionKey:
        """Return the key to a segment, connecting and asking if need be.

        Args:
            where: Which segment of which node.
            deadline_s: Of the monotonic clock.

        Raises:
            NodeUnreachable: No connection or no offer before the deadline.
        """
        target = (where.node, where.segment)
        key = self._keys.get(target)
        if key is not None:
            return key
        with self._offered:
            asking = self._asking.setdefault(target, threading.Lock())
        if not asking.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise _unreachable(where, "another thread is still asking for its segment")
        try:
            key = self._keys.get(target)
            return key if key is not None else self._ask(where, deadline_s)
        finally:
            asking.release()

    def outbox(self, target: Target) -> mailbox.Outbox | None:
        """Return the mailbox of a segment's node if it is open here and takes notes."""
        outbox = self._outboxes.get(target)
        return outbox if outbox is not None and outbox.live else None

    def tell_row(self, where: NodeAddress, row: Row) -> None:
        """As `tell`, of one block without a part table."""
        outbox = self._outboxes.get((where.node, where.segment))
        if outbox is None or not outbox.leave(write_row(where.segment, row)):
            self.tell(where.node, Written(columns_of_rows([row]), where.segment))

    def tell(self, node: str, note: Written | Unwritten) -> None:
        """Leave or send a note to a node that there is a key of. Raises TransferError.

        It is the node's when this returns, even if this process ends.
        """
        target = node, note.segment
        outbox = self._outboxes.get(target)
        if outbox is None and target in self._mailboxes:
            outbox = self._open_mailbox(target)
        if outbox is not None and outbox.leave(write_note(note)):
            return
        if target in self._stamped:  # also while another thread opens the mailbox
            note = replace(note, stamp=time.monotonic_ns())
        payload = encode_to_node(note)
        if node == self._engine.name and self._local_node is not None:
            self._local_node.on_notify(node, payload)
        else:
            self._engine.notify(node, payload)

    def say(self, where: NodeAddress, note: Written | Unwritten) -> None:
        """As `tell`, with or behind what was written, where notes can be; waits for it then."""
        left = self.leave(where, note)
        if left is None:
            self.tell(where.node, note)
        else:
            left.wait()

    def takes_note(self, where: NodeAddress) -> bool:
        """Tell whether a note about a segment should go with a write: there is no mailbox."""
        target = where.node, where.segment
        return (
            target in self._noted
            and target not in self._outboxes
            and (target not in self._mailboxes or self._open_mailbox(target) is None)
        )

    def leave(self, where: NodeAddress, note: Written | Unwritten) -> Transfer | None:
        """Begin to leave a note behind all that was written; None: `tell` it.

        It is the node's when the transfer has ended well. Raises TransferError.
        """
        key = self.known(where)
        if key is None or not self.takes_note(where):
            return None
        payload = write_note(note)
        if len(payload) > NOTE_BYTES_MAX:
            return None
        return self.write(where, self._one_byte(), key, 0, 0, 0, payload)

    def _one_byte(self) -> Region:
        """Return memory of which nobody wants to know what lies there."""
        with self._offered:
            if self._nothing is None:
                memory = allocate(1, huge_pages=False)
                self._nothing = self._engine.register(memory), memory
            return self._nothing[0]

    def write(
        self,
        where: NodeAddress,
        region: Region,
        key: RegionKey,
        offset: int,
        target_offset: int,
        nbytes: int,
        note: bytes,
    ) -> Transfer | None:
        """Write bytes and a note about them; None, and nothing is written, if notes are sent."""
        transfer = self._engine.write_with_note(
            where.node, region, key, offset, target_offset, nbytes, note,
            priority=Priority.KV_PUT,
        )  # fmt: skip
        if transfer is None:
            self._noted.discard((where.node, where.segment))
        return transfer

    def forget(self, node: str) -> None:
        """Ask anew next time: a key of this node did not work."""
        with self._offered:
            for target in [target for target in self._keys if target[0] == node]:
                del self._keys[target]
                self._mailboxes.pop(target, None)
                self._outboxes.pop(target, None)

    def receive(self, peer: str, note: OfferSegment | AskAtRest) -> None:
        """Take an offer, or a question; called on the engine's thread.

        Offers that nobody asked for are ignored.
        """
        if isinstance(note, AskAtRest):
            self._asked_at_rest(peer, note)
            return
        key = RegionKey.decode(note.region_key)
        usable = note.mailbox and note.clock == self._clock and mailbox.is_available()
        box = RegionKey.decode(note.mailbox) if usable else None
        with self._offered:
            target = self._awaited.get(note.ask_id)
        if target is None or not key.owner == peer == target[0]:
            return
        if note.anew:
            self._heed(note.leaders)
            self.under_way.void(target)
        with self._offered:
            if box is not None and box.owner == peer:
                self._mailboxes[target] = box
                self._stamped.add(target)
            if note.takes_notes:
                self._noted.add(target)
            self._keys[target] = key
            self._offered.notify_all()

    def _ask(self, where: NodeAddress, deadline_s: float) -> RegionKey:
        if where.node == self._engine.name:
            return self._ask_local(where)
        target, ask_id = (where.node, where.segment), next(self._ask_ids)
        with self._offered:
            self._awaited[ask_id] = target
        try:
            remaining_s = max(0.001, deadline_s - time.monotonic())
            peer = self._engine.connect(where.address, timeout_s=remaining_s)
            if peer.name != where.node:
                raise _unreachable(where, f"its address belongs to {peer.name} now")
            note = AskSegment(ask_id=ask_id, segment=where.segment)
            self._engine.notify(where.node, encode_to_node(note))
            with self._offered:
                self._offered.wait_for(
                    lambda: target in self._keys, timeout=max(0.0, deadline_s - time.monotonic())
                )
                key = self._keys.get(target)
        except TransferError as error:
            raise _unreachable(where, f"{type(error).__name__}: {error}") from error
        finally:
            with self._offered:
                del self._awaited[ask_id]
        if key is None:
            raise _unreachable(
                where,
                "it did not offer its segment in time: it hangs, or its engine, or this client's,"
                " was not told to hand on notes (`engine.on_notify`)",
            )
        return key

    def _open_mailbox(self, target: Target) -> mailbox.Outbox | None:
        """Map a mailbox that was offered, if memory of the node can be mapped."""
        with self._offered:
            key = self._mailboxes.pop(target, None)
        if key is None:
            return None
        node, outbox = target[0], None
        memory = allocate(mailbox.GREETING_BYTES, huge_pages=False)
        region = self._engine.register(memory)
        try:
            if self._engine.peer(node).backend == "shared_memory":
                at, nbytes = mailbox.GREETING_OFFSET, mailbox.GREETING_BYTES
                self._engine.write(node, region, key, 0, at, nbytes).wait()
                mapped = self._engine.in_place(node, key)
                if mapped is not None:
                    self._outboxes[target] = outbox = mailbox.Outbox(mapped)
        except TransferError as error:  # notes are sent, then
            logger.info("no mailbox at %s: %s", node, error)
        finally:
            self._engine.release(region)
            memory.close()
            if outbox is None and target not in self._noted:
                self._stamped.discard(target)
        return outbox

    def _ask_local(self, where: NodeAddress) -> RegionKey:
        if self._local_node is None:
            raise _unreachable(where, "it is this process, but its node was not given")
        key = self._local_node.offer_to(where.node, where.segment)
        with self._offered:
            self._keys[where.node, where.segment] = key
        return key

    def _heed(self, leaders: Sequence[Leader]) -> None:
        """Take nothing of their predecessors any more."""
        for leader in leaders:
            self._on_leader(
                MasterRecord(shard=leader.shard, address=leader.address, term=leader.term)
            )

    def _asked_at_rest(self, node: str, note: AskAtRest) -> None:
        self._heed(note.leaders)
        answer = AtRest(note.segment, note.number)
        self.under_way.when_at_rest(
            (node, note.segment), note.number, lambda: self._note(node, answer)
        )

    def _note(self, node: str, note: NodeNote) -> None:
        try:
            self._engine.notify(node, encode_to_node(note))
        except TransferError as error:  # it asks again, or does without
            logger.debug("%s for %s: %s", type(note).__name__, node, error)


def _ignore(record: MasterRecord) -> None:
    """Nobody wants to know of masters."""


def _unreachable(where: NodeAddress, problem: str) -> NodeUnreachable:
    return NodeUnreachable(node=where.node, address=where.address, problem=problem)
