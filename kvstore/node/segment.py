"""One segment that a node lends: its bytes, what is known of them, and who may reach them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from configs.kvstore_segments import FileReader, SegmentConfig, SegmentMedium
from kvstore.errors import StoreClosed
from kvstore.node.block_check import BlockCheck
from kvstore.node.cxl_segment import CxlSegment
from kvstore.node.dram_segment import DramSegment
from kvstore.node.indexed_block import IndexedBlock, columns_of
from kvstore.node.kept_index import IndexFigures, KeptIndex
from kvstore.node.mailboxes import Said, joined, told_at
from kvstore.node.rest_questions import Role, Writer
from kvstore.node.segment_memory import SegmentMemory
from kvstore.node.ssd_segment import MakeSlab, SsdSegment
from kvstore.wire.messages import HeldBlocks, Medium
from kvstore.wire.peer_messages import Unwritten
from transfer import Access
from transfer.backends.file import FileSlab

if TYPE_CHECKING:
    from transfer import Region, RegionKey, TransferEngine

logger = logging.getLogger(__name__)


class Segment:
    """A node's segment. Thread-safe.

    Args:
        number: Its number in the node.
        memory: Where its bytes lie; opened and closed by this object.
        verify_bytes: What `held` verifies at most.
    """

    def __init__(self, number: int, memory: SegmentMemory, *, verify_bytes: int) -> None:
        self.number = number
        self.memory = memory
        self._verify_bytes = verify_bytes
        self._engine: TransferEngine | None = None
        self._region: Region | None = None
        self._index: KeptIndex | None = None
        self._catch_up: Callable[[], None] = _ignore
        self._lock = threading.Lock()
        self._offers: dict[tuple[str, bool], RegionKey] = {}
        # Of clients: withdrawn, and something that was asked for under them may be under way.
        self._void: dict[str, dict[bytes, RegionKey]] = {}
        self._untouched = True

    @property
    def medium(self) -> Medium:
        """What its bytes lie in."""
        return self.memory.medium

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.nbytes

    @property
    def untouched(self) -> bool:
        """Whether nobody was given access to it in this life of the node."""
        return self._untouched

    @property
    def region(self) -> Region:
        """Its bytes as the engine knows them."""
        if self._region is None:
            raise self._closed()
        return self._region

    @property
    def is_logged(self) -> bool:
        """Whether what is noted has to reach a log soon, so that notes cannot wait to be taken."""
        return self._opened().is_kept

    @property
    def index(self) -> KeptIndex:
        """What lies in it, as far as writers have said by now."""
        self._catch_up()
        return self._opened()

    def on_look(self, catch_up: Callable[[], None]) -> None:
        """Call `catch_up` before somebody looks at the index: it enters what was said before."""
        self._catch_up = catch_up

    def on_write(self, attend: Callable[[], None]) -> None:
        """Call `attend` when something is about to be written of which a log has to tell."""
        memory = self.memory
        if not isinstance(memory, SsdSegment):
            return

        def before() -> None:
            attend()
            self._catch_up()  # what was said of a place before holds no more, and is not late

        memory.on_write(before)

    def open(self, engine: TransferEngine) -> None:
        """Get hold of the bytes and register them. Raises as `SegmentMemory.open`."""
        self._index = self.memory.open()
        try:
            self._region = engine.register(self.memory.lend())
        except BaseException:
            self.memory.close()
            raise
        self._engine = engine

    def close(self) -> None:
        """Let nobody reach the bytes any more, and give them back; idempotent."""
        engine, self._engine = self._engine, None
        region, self._region = self._region, None
        if engine is None or region is None:
            return
        engine.release(region)
        self.memory.close()
        if self._index is not None:
            self._index.close()

    def offer_to(self, name: str, *, for_copies: bool = False) -> RegionKey:
        """Return a fresh key for one peer; its earlier one is withdrawn.

        Args:
            name: The peer's engine.
            for_copies: Its node asks, not its client: each of them has a key of its own.
        """
        with self._lock:
            engine, region = self._engine, self._region
            if engine is None or region is None:
                raise self._closed()
            self._untouched = False
            earlier = self._offers.pop((name, for_copies), None)
            if earlier is not None and not engine.withdraw(earlier) and not for_copies:
                self._void.setdefault(name, {})[earlier.token] = earlier
            key = engine.offer(
                region, to=name, access=Access.READ | Access.WRITE, offset=0, nbytes=self.nbytes
            )
            self._offers[name, for_copies] = key
            return key

    def writers(self) -> list[Writer]:
        """Return who has a key, in other processes."""
        with self._lock:
            own = "" if self._engine is None else self._engine.name
            return [
                Writer(name, Role.COPIER if for_copies else Role.CLIENT)
                for name, for_copies in self._offers
                if name != own
            ]

    def withdraw_from(self, name: str) -> bool:
        """Let a client reach the bytes no more; unknown ones are ignored.

        Returns:
            False if the segment's disk is still writing what that client has asked for. Then ask
            again: after True nothing of what it asked for under any of its keys is written.
        """
        with self._lock:
            engine = self._engine
            key = self._offers.pop((name, False), None)
            if key is not None:
                self._void.setdefault(name, {})[key.token] = key
            waiting = list(self._void.get(name, {}).values())
        # Without the lock: it may wait for the disk.
        still = [key for key in waiting if engine is not None and engine.withdraw(key)]
        with self._lock:
            void = self._void.get(name, {})
            for key in still:
                void.pop(key.token, None)
            if not void:
                self._void.pop(name, None)
            return not void

    def record(self, held: HeldBlocks) -> int:
        """Remember what a writer says now; return how many blocks were possible."""
        return self.index.record(held, told_at(time.monotonic_ns()))

    def enter(self, notes: Iterable[Said]) -> None:
        """Remember what writers have said, in this order."""
        index = self._opened()
        for said, told_ns in joined(notes):
            if not isinstance(said, Unwritten):
                index.record(said, told_ns)
                continue
            block = index.at(said.offset)
            if block is not None and block.key == said.key:
                index.forget(block)

    def set_pinned(self, offset: int, key: bytes, *, pinned: bool) -> None:
        """Remember whether a block is pinned hard, if it is still there."""
        self.index.set_pinned(offset, key, pinned=pinned)

    def held(self) -> HeldBlocks:
        """Return what lies here, verified up to a number of bytes; what is wrong is forgotten.

        What was never verified in this life comes first. The rest is told unverified: readers
        verify what they copy, and the scrubber what nobody reads.
        """
        blocks = self.index.blocks()
        self.verify(_within(sorted(blocks, key=lambda b: b.verified), self._verify_bytes))
        return columns_of(block for block in blocks if self.index.holds(block))

    def verify(self, blocks: Iterable[IndexedBlock], *, timeout_s: float = 60.0) -> None:
        """Read blocks; forget those whose bytes are wrong or cannot be read."""
        check = BlockCheck(self.memory)
        for block, intact in check.run(blocks, deadline_s=time.monotonic() + timeout_s):
            if not intact:
                self.index.forget(block)

    def figures(self) -> IndexFigures:
        """Return the index's figures."""
        return self.index.figures()

    def _opened(self) -> KeptIndex:
        if self._index is None:
            raise self._closed()
        return self._index

    def _closed(self) -> StoreClosed:
        return StoreClosed(what=f"segment {self.number}", problem="not open")


def _ignore() -> None:
    """Nothing is said that is not entered at once."""


def make_segments(
    configured: Iterable[SegmentConfig], *, verify_bytes: int, make_slab: MakeSlab | None = None
) -> list[Segment]:
    """Make the segments of a node, by their numbers; none is open.

    Args:
        configured: What is lent.
        verify_bytes: See `Segment`.
        make_slab: Of segments that are read by DeepNVMe; None: it is not to be had.
    """
    return [
        Segment(number, _memory_of(config, make_slab), verify_bytes=verify_bytes)
        for number, config in enumerate(configured)
    ]


def _memory_of(config: SegmentConfig, make_slab: MakeSlab | None) -> SegmentMemory:
    if config.medium is SegmentMedium.SSD:
        assert config.path is not None, config
        wanted = config.reader is FileReader.DEEPNVME
        if wanted and make_slab is None:
            logger.warning("%s is read by threads: no DeepNVMe was given to the node", config.path)
        maker = make_slab if wanted and make_slab is not None else FileSlab
        return SsdSegment(config.path, config.bytes, config.file, make_slab=maker)
    if config.path is not None:
        return CxlSegment(config.path, config.bytes)
    return DramSegment(
        config.bytes,
        hugepages=config.hugepages,
        numa_node=config.numa_node,
        medium=Medium(config.medium.value),
    )


def _within(blocks: Iterable[IndexedBlock], nbytes: int) -> list[IndexedBlock]:
    chosen = []
    for block in blocks:
        nbytes -= block.nbytes
        if nbytes < 0:
            break
        chosen.append(block)
    return sorted(chosen, key=lambda b: b.offset)
