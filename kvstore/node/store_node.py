"""A store node: lends segments of memory and of disks to the pool.

    client                         node                            master
      │ AskSegment ──────────────▶ │                                  │
      │ ◀───────── OfferSegment    │ Register(capacity, held) ──────▶ │   per segment
      │ == one-sided write/read ═▶ │ Heartbeat ─────────────────────▶ │
      │ Written ─────────────────▶ │ ◀── Known(False): register again │

Bytes come and go without the node's doing. It answers who wants a key to a segment, tells the
master that it lives, and remembers what was written, so that a new master can be told.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.copying import sharing_copies
from kvstore.discovery.directory import MasterDirectory
from kvstore.errors import KVStoreError, StoreClosed
from kvstore.node.copier import Copier, CopyFigures
from kvstore.node.index_keeper import IndexKeeper
from kvstore.node.indexed_block import IndexedBlock
from kvstore.node.kept_index import IndexFigures
from kvstore.node.mailboxes import Mailboxes, Said
from kvstore.node.registration import Registration
from kvstore.node.scrubber import Scrubber, ScrubFigures
from kvstore.node.segment import Segment, make_segments
from kvstore.node.settlement import Heed, Settlement
from kvstore.node.ssd_segment import MakeSlab
from kvstore.node.target_keys import TargetKeys
from kvstore.shards.plan import shard_of
from kvstore.timeouts import check_timeout
from kvstore.wire import messages as m
from kvstore.wire.peer_messages import (
    TO_NODE,
    AskAtRest,
    AskSegment,
    AtRest,
    Leaving,
    NodeNote,
    OfferSegment,
    Unwritten,
    Written,
    decode_to_node,
    encode_to_client,
    encode_to_node,
)
from transfer import TransferError

if TYPE_CHECKING:
    from configs.schema import KVStoreConfig
    from kvstore.client.writes_under_way import WritesUnderWay
    from transfer import RegionKey, TransferEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatistics:
    """A node now: its segments' indices by number, and what was done since it was opened."""

    segments: tuple[IndexFigures, ...]
    scrub: ScrubFigures
    copies: CopyFigures


class StoreNode:
    """One process's part of the pool.

    The owner of the engine has it hear notes: `engine.on_notify(node.on_notify)`, before it opens
    the engine. All methods are thread-safe.

    Args:
        engine: Open, or opened before `open`.
        masters: The address of the only master, those of several, or a directory of them.
        config: The store's knobs; `config.lent` says what is lent.
        secret: The cluster secret.
        make_slab: What reads and writes the files of segments with `reader: deepnvme`.
    """

    def __init__(
        self,
        engine: TransferEngine,
        masters: str | Sequence[str] | MasterDirectory,
        config: KVStoreConfig,
        *,
        secret: bytes,
        make_slab: MakeSlab | None = None,
    ) -> None:
        self._engine = engine
        self._segments = make_segments(
            config.lent, verify_bytes=config.verify_bytes, make_slab=make_slab
        )
        self._keys = TargetKeys(engine)
        self._copier = Copier(engine, self._segments, config, self._keys)
        self._settlement = Settlement(engine, self._segments, put_s=config.open_put_s)
        self._settlement.meet_writer(self._copier.under_way, lambda leaders: None)
        self._registration = Registration(
            engine, masters, config, self._settlement, secret=secret, on_work=self._copier.wake
        )
        self._mailboxes = Mailboxes(engine, self._enter)
        self._keeper = IndexKeeper(self._segments)
        for segment in self._segments:
            segment.on_look(self._mailboxes.catch_up)
            segment.on_write(self._keeper.attend)
        self._scrubber = Scrubber(self._segments, config.scrub, self._report)
        self._share_copies = config.share_copies
        self._stack = ExitStack()

    @property
    def name(self) -> str:
        """The node's incarnation, its engine's name."""
        return self._engine.name

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What it lends, by number."""
        return tuple(self._segments)

    def open(self) -> None:
        """Lend the segments. Registration goes on in the background; see `wait_registered`.

        Raises:
            EngineClosed: The engine is not open yet.
            As `Segment.open`, of the first that cannot be had; the others are given back.
        """
        logger.debug("store node %s opens at %s", self.name, self._engine.address)
        with ExitStack() as stack:
            stack.enter_context(sharing_copies(self._share_copies))
            for segment in self._segments:
                segment.open(self._engine)
                stack.callback(segment.close)
            stack.callback(self._mailboxes.close)
            stack.callback(self._keeper.close)
            self._keeper.open()
            stack.callback(self._registration.close)
            self._registration.open(self._segments)
            for worker in (self._scrubber, self._copier):
                stack.callback(worker.close)
                worker.open()
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Take the segments back from the pool; what only DRAM held is gone. Idempotent."""
        self._stack.close()
        self._registration.close()

    def __enter__(self) -> StoreNode:
        self.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until the master knows this node; False at the deadline. Raises InvalidValue."""
        check_timeout(timeout_s)
        return self._registration.wait(timeout_s)

    def use_master(self, address: str) -> None:
        """Register with another master from now on."""
        self._registration.use_master(address)

    def statistics(self) -> NodeStatistics:
        """Return its figures. Raises StoreClosed if it was never open."""
        return NodeStatistics(
            segments=tuple(segment.figures() for segment in self._segments),
            scrub=replace(self._scrubber.figures()),
            copies=replace(self._copier.figures()),
        )

    def on_notify(self, peer: str, payload: bytes) -> bool:
        """Take a note if it is for a store node.

        Short enough for the engine's thread.

        Returns:
            True if the note was for us; the engine's owner then looks no further.
        """
        if not payload.startswith(TO_NODE):
            return False
        try:
            note = decode_to_node(payload)
        except msgspec.MsgspecError as error:
            logger.warning("malformed note from %s: %s", peer, error)
            return True
        try:
            self._take(peer, note)
        except (TransferError, KVStoreError) as error:
            logger.info("%s of %s: %s", type(note).__name__, peer, error)
        return True

    def meet_writer(self, writes: WritesUnderWay, heed: Heed) -> None:
        """Count a client on the same engine among those who may write in the segments."""
        self._settlement.meet_writer(writes, heed)

    def part_with(self, writes: WritesUnderWay) -> None:
        """It writes no more."""
        self._settlement.part_with(writes)

    def memory(self, segment: int = 0) -> NDArray[np.uint8] | None:
        """Return a segment's bytes, for this process alone; None unless it is open memory."""
        return self._segment(segment).memory.array

    def offer_to(self, name: str, segment: int = 0) -> RegionKey:
        """Return a fresh key to a segment for one client; its earlier one is withdrawn.

        Raises:
            StoreClosed: The node is not open, or has no such segment.
        """
        if name != self.name:
            self._settlement.witness.trust(name)
        return self._segment(segment).offer_to(name)

    def _segment(self, number: int) -> Segment:
        if not 0 <= number < len(self._segments):
            raise StoreClosed(what="StoreNode", problem=f"has no segment {number}")
        return self._segments[number]

    def _take(self, peer: str, note: NodeNote) -> None:
        if isinstance(note, Written | Unwritten):
            self._record(note)
        elif isinstance(note, AskSegment):
            self._answer(peer, note)
        elif isinstance(note, OfferSegment):
            self._registration.heed(note.leaders)
            self._keys.receive(peer, note)
        elif isinstance(note, AtRest):
            self._settlement.receive(peer, note)
        elif isinstance(note, Leaving):
            self._settlement.leave(peer, self._segment(note.segment))
        elif isinstance(note, AskAtRest):
            self._registration.heed(note.leaders)
            self._copier.say_at_rest(peer, note)

    def _answer(self, peer: str, note: AskSegment) -> None:
        segment = self._segment(note.segment)
        key, is_back = self._settlement.witness.admit(
            peer, lambda: segment.offer_to(peer, for_copies=note.for_copies)
        )
        # As of after the offer: those before it are asked.
        anew = self._settlement.is_anew() or is_back
        mailbox, clock = b"", ""
        if not note.for_copies:
            mailbox, clock = self._mailboxes.offer_to(peer)
        # What comes with a write wakes nobody: it cannot wait where a log has to be written.
        takes_notes = not note.for_copies and not segment.is_logged
        leaders = self._settlement.leaders if anew else []
        offer = OfferSegment(note.ask_id, key.encode(), anew, leaders, mailbox, clock, takes_notes)
        encode = encode_to_node if note.for_copies else encode_to_client
        self._engine.notify(peer, encode(offer))

    def _record(self, note: Written | Unwritten) -> None:
        self._mailboxes.take_sent(note)
        if self._segment(note.segment).is_logged:
            self._keeper.wake()

    def _enter(self, number: int, notes: Sequence[Said]) -> None:
        try:
            self._segment(number).enter(notes)
        except KVStoreError as error:
            logger.info("%s notes of segment %s: %s", len(notes), number, error)

    def _report(self, segment: int, blocks: Sequence[IndexedBlock]) -> int:
        """Tell the masters of blocks that are no more; return how many they believed in."""
        links = self._registration.links
        dropped = 0
        for shard, link in enumerate(links):
            theirs = [block for block in blocks if shard_of(block.key, len(links)) == shard]
            if theirs:
                request = m.ReportBad(
                    client=self.name,
                    keys=[block.key for block in theirs],
                    nodes=[self.name] * len(theirs),
                    offsets=[block.offset for block in theirs],
                    corrupt=[True] * len(theirs),
                    segments=[segment] * len(theirs),
                )
                dropped += link.ask(request, m.Done).count
        return dropped
