"""A node's standing with the masters: registers what it lends, and says that it lives.

    node                                  master i of N
      │ Register(segment 0, share i, held) ─▶ │
      │ Hold(segment 0, further blocks) ────▶ │   while there are more
      │ Register(segment 1, ...) ───────────▶ │
      │ Heartbeat ──────────────────────────▶ │   every `heartbeat_s`
      │ ◀────────────────────── Known(False)  │   it forgot, or it is a new one: register again
      │ Settled(segment) ───────────────────▶ │   once all writers say that they are at rest

Each master has its own share of each segment, and of what lies there:

    segment  │  share of master 0  │  share of master 1  │ ... │ rest, unused │

One thread does all of it; the bytes of the segments come and go meanwhile. It is woken when the
connection to a master ends or another takes its place, so that a new master need not wait for the
next heartbeat.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import asdict

from kvstore.discovery.directory import MasterDirectory, StaticMasters, as_directory
from kvstore.errors import Fenced, KVStoreError
from kvstore.node.heard_pins import HeardPins
from kvstore.node.lent_segment import LentSegment
from kvstore.node.settlement import Settlement
from kvstore.node.writer_witness import WriterWitness
from kvstore.shards.plan import shard_of
from kvstore.wire import messages as m
from kvstore.wire.master_link import MasterLink, ReplyT, expect
from kvstore.wire.peer_messages import Leader
from kvstore.wire.standing import MasterRecord, MasterStanding
from transfer.control import ClientClosed
from transfer.fan_out import RpcFanOut

if TYPE_CHECKING:
    from configs.schema import KVStoreConfig
    from transfer import TransferEngine

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.1
PARTING_S: Final = 2.0  # who leaves waits for a master no longer, twice at most
PIECE_BLOCKS: Final = 1 << 12  # between two pieces the master answers others
SHARE_ALIGNMENT: Final = 4096


class Registration:
    """Keeps a node registered. Thread-safe.

    Args:
        engine: The node's; its name is the node's incarnation, and open when `open` is called.
        masters: The address of the only master, those of several, or a directory of them.
        config: The store's knobs.
        settlement: Asks the writers.
        secret: The cluster secret.
        on_work: Called with the way to a master that has copies for the node to make. Must not
            wait.
    """

    def __init__(
        self,
        engine: TransferEngine,
        masters: str | Sequence[str] | MasterDirectory,
        config: KVStoreConfig,
        settlement: Settlement,
        *,
        secret: bytes,
        on_work: Callable[[MasterLink], None] = lambda link: None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._settlement = settlement
        self._on_work = on_work
        self._directory = as_directory(masters)
        self._ways = [
            _Way(shard, engine.name, secret=secret, timeout_s=config.request_timeout_s)
            for shard in range(self._directory.num_shards)
        ]
        self._rpc = RpcFanOut(secret, identity=f"{engine.name}.node", on_lost=self._lost)
        self._segments: Sequence[LentSegment] = ()
        self._pins = HeardPins()
        self._closing = False
        self._awake = threading.Event()
        self._registered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-node", daemon=True)
        settlement.on_news(self._awake.set)

    def open(self, segments: Sequence[LentSegment]) -> None:
        """Start to register these segments, in the background; see `wait`."""
        self._segments = self._pins.segments = segments
        self._directory.subscribe(self._meet)
        self._thread.start()

    def close(self) -> None:
        """Stop, and tell the masters that answer that the node leaves. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._directory.unsubscribe(self._meet)
        self._awake.set()
        started = self._thread.is_alive()
        if started:
            self._thread.join(PARTING_S)
        self._rpc.close()  # what still waits for a master waits in vain
        if started:
            self._thread.join()
        for way in self._ways:
            if way.registered and way.answers:
                self._leave(way.link)
            way.link.close()

    def _leave(self, link: MasterLink) -> None:
        timeout_s = min(PARTING_S, self._config.request_timeout_s)
        try:
            link.ask(m.Leave(self._engine.name), m.Done, timeout_s=timeout_s)
        except KVStoreError as error:
            logger.info("store node %s left without saying so: %s", self._engine.name, error)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all masters know this node; False at the deadline."""
        return self._registered.wait(timeout_s)

    def use_master(self, address: str) -> None:
        """Register with another master from now on, where there is one at a known address."""
        assert isinstance(self._directory, StaticMasters), self._directory
        self._directory.move([address])

    @property
    def links(self) -> tuple[MasterLink, ...]:
        """The ways to the masters, by shard, for what else the node has to say."""
        return tuple(way.link for way in self._ways)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing and self._beat():
            # Unregistered, it tries again soon: the master may be just starting.
            registered = all(way.registered and way.answers for way in self._ways)
            self._awake.wait(self._config.heartbeat_s if registered else RETRY_S)
            self._awake.clear()

    def _beat(self) -> bool:
        """Tell the masters that we live; False if one wants nothing of us ever again."""
        name = self._engine.name
        known = [way for way in self._ways if way.registered]
        try:
            for way, reply in self._ask(known, m.Heartbeat(name, self._pins.numbers), m.Known):
                if isinstance(reply, Fenced):
                    raise reply
                way.answers = isinstance(reply, m.Known)
                if not isinstance(reply, m.Known):
                    logger.debug("heartbeat of store node %s: %s", name, reply)
                elif not reply.known:
                    logger.info("a master does not know store node %s (any more)", name)
                    self._forgotten(way)
                else:
                    self._pins.heed(reply.pins)
                    if reply.copies:
                        self._on_work(way.link)
            if self._closing:
                return False
            self._register([way for way in self._ways if not way.registered])
            self._settle()
            self._bear_witness()
        except ClientClosed:
            return False  # by `close`
        except Fenced:
            logger.warning("store node %s is fenced", name)
            return False
        return True

    def _register(self, ways: Sequence[_Way]) -> None:
        ways = [way for way in ways if way.standing.record.address]
        if not ways:
            return
        held = [segment.held() for segment in self._segments]
        for way in ways:
            record, started_s = way.standing.record, time.monotonic()
            self._settlement.meet(record, again=way.was_told)
            way.was_told = True
            try:
                adopted = sum(
                    self._tell(way, s, h) for s, h in zip(self._segments, held, strict=True)
                )
            except Fenced:
                raise
            except KVStoreError as error:
                # Once: it tries again soon, and says so when it is registered.
                level = logging.DEBUG if way.is_missed else logging.WARNING
                logger.log(level, "store node %s waits for a master: %s", self._engine.name, error)
                way.is_missed = True
                continue
            way.is_missed = False
            if way.standing.record.address != record.address:
                continue  # it was told to a master that leads no more
            way.registered = way.answers = True
            touched = [segment.number for segment in self._segments if not segment.untouched]
            self._settlement.registered(record.shard, touched)
            logger.info(
                "store node %s lends %s segments to master %s; %s blocks known again in %.0f ms",
                self._engine.name,
                len(self._segments),
                record.shard,
                adopted,
                1e3 * (time.monotonic() - started_s),
            )
        if all(way.registered for way in self._ways):
            self._registered.set()

    def _settle(self) -> None:
        """Ask the writers that have not answered, and tell the masters of those that have."""
        for news in self._settlement.ask():
            way = self._ways[news.shard]
            if not way.registered:
                continue  # asked anew when it is
            request = m.Settled(self._engine.name, news.segment, list(news.waiting))
            for _, reply in self._ask([way], request, m.Done):
                if isinstance(reply, Fenced):
                    raise reply
                if isinstance(reply, KVStoreError):
                    logger.debug("store node %s not settled: %s", self._engine.name, reply)
                else:
                    self._settlement.told(news)

    def _bear_witness(self) -> None:
        """Tell the masters of writers that ended without a word, and ask for those unnoticed."""
        witness, now = self._settlement.witness, time.monotonic()
        if not witness.is_due(now):
            return
        dead = {disks: witness.cut_off_dead(disks=disks) for disks in (False, True)}
        try:
            ways = [way for way in self._ways if way.registered and way.answers]
            for way in ways:
                for disks, names in dead.items():
                    self._end_writes(way, witness, names, disks=disks)
        except Fenced:
            raise
        except KVStoreError as error:
            logger.debug("store node %s, writers: %s", self._engine.name, error)
        else:
            everywhere = [name for name in dead[False] if name in dead[True]]
            witness.asked(everywhere if len(ways) == len(self._ways) else (), now)

    def _end_writes(
        self, way: _Way, witness: WriterWitness, dead: list[str], *, disks: bool
    ) -> None:
        """Do so for the segments of disks, or for all others: another proof holds there."""
        name = self._engine.name
        lent = [s.number for s in self._segments if (s.medium is m.Medium.SSD) is disks]
        if not lent:
            return
        listed = self._one(way, m.WritersAt(name, lent), m.WritersThere).writers
        for writers, are_dead in ((dead, True), (witness.cut_off(listed, disks=disks), False)):
            if not writers:
                continue
            question = m.WritersAt(name, lent, writers, are_dead)
            there = self._one(way, question, m.WritersThere)
            for writer, batches in zip(writers, there.batches, strict=True):
                if batches and witness.is_out(writer):
                    over = m.WritesOver(name, lent, writer, batches, are_dead)
                    freed = self._one(way, over, m.Done).count
                    logger.info("%s is out of %s: %s places are free", writer, name, freed)

    def _tell(self, way: _Way, segment: LentSegment, held: m.HeldBlocks) -> int:
        """Register one segment's share with one master; return how many blocks it adopted."""
        base, capacity = share_of(segment.nbytes, way.standing.record.shard, len(self._ways))
        pieces = list(_pieces(held, way.standing.record.shard, len(self._ways), base, capacity))
        first = m.Register(
            node=self._engine.name,
            address=self._engine.address,
            capacity=capacity,
            untouched=segment.untouched,
            held=pieces[0],
            segment=segment.number,
            medium=segment.medium,
            base=base,
            more=len(pieces) > 1,
        )
        adopted = self._one(way, first, m.Registered).adopted
        for idx, piece in enumerate(pieces[1:], start=2):
            more = idx < len(pieces)
            further = m.Hold(self._engine.name, segment.number, piece, more=more)
            adopted += self._one(way, further, m.Registered).adopted
        return adopted

    def _one(self, way: _Way, request: m.Request, expected: type[ReplyT]) -> ReplyT:
        ((_, reply),) = self._ask([way], request, expected)
        if isinstance(reply, KVStoreError):
            raise reply
        return reply

    def _ask(
        self, ways: Sequence[_Way], request: m.Request, expected: type[ReplyT]
    ) -> list[tuple[_Way, ReplyT | KVStoreError]]:
        """Ask several masters the same; what went wrong takes the place of a reply."""
        timeout_s = self._config.request_timeout_s
        payload, operation = m.encode(request), type(request).__name__
        asked = [(way, record) for way in ways if (record := way.standing.record).address]
        replies = self._rpc.request([(r.address, payload) for _, r in asked], timeout_s=timeout_s)
        results: list[tuple[_Way, ReplyT | KVStoreError]] = []
        for (way, record), reply in zip(asked, replies, strict=True):
            try:
                answer = way.standing.read(operation, record, reply)
                results.append((way, expect(request, answer.reply, expected)))
            except KVStoreError as error:
                results.append((way, error))
        return results

    def heed(self, leaders: Sequence[Leader]) -> None:
        """Another node follows these elected masters: do nothing for their predecessors."""
        for leader in leaders:
            if leader.shard >= len(self._ways):
                continue  # of another pool: the directory says how many masters there are
            self._meet(MasterRecord(shard=leader.shard, address=leader.address, term=leader.term))

    # -- other threads --------------------------------------------------------------------------

    def _meet(self, record: MasterRecord) -> None:
        way = self._ways[record.shard]
        previous = way.standing.record
        if way.standing.meet(record):
            way.link.redirect(record.address, term=record.term)
            self._forgotten(way)
            if previous.address and previous.address != record.address:
                self._rpc.forget(previous.address)
            self._awake.set()

    def _forgotten(self, way: _Way) -> None:
        self._registered.clear()
        way.registered = False

    def _lost(self, address: str) -> None:
        if any(way.standing.record.address == address for way in self._ways):
            self._awake.set()


class _Way:
    """One shard's master as this node knows it."""

    def __init__(self, shard: int, name: str, *, secret: bytes, timeout_s: float) -> None:
        self.standing = MasterStanding(MasterRecord(shard=shard), identity=f"{name}.node")
        self.link = MasterLink("", secret=secret, identity=f"{name}.copies", timeout_s=timeout_s)
        self.registered = False
        self.was_told = False  # what is lent, perhaps in vain, by this master or one before it
        self.answers = False
        self.is_missed = False  # the log says so already


def share_of(nbytes: int, shard: int, num_shards: int) -> tuple[int, int]:
    """Return (start, size) of the part of a segment that belongs to one of several masters."""
    if num_shards == 1:
        return 0, nbytes
    share = nbytes // num_shards // SHARE_ALIGNMENT * SHARE_ALIGNMENT
    return shard * share, share


def _pieces(
    held: m.HeldBlocks, shard: int, num_shards: int, base: int, capacity: int
) -> Iterator[m.HeldBlocks]:
    """Cut what lies in one share into messages; at least one, in the order of offsets."""
    theirs = [
        row
        for row in sorted(range(len(held.keys)), key=held.offsets.__getitem__)
        if base <= held.offsets[row] < base + capacity
        and (num_shards == 1 or shard_of(held.keys[row], num_shards) == shard)
    ]
    columns = asdict(held)
    for start in range(0, max(1, len(theirs)), PIECE_BLOCKS):
        rows = theirs[start : start + PIECE_BLOCKS]
        yield m.HeldBlocks(
            **{name: [c[row] for row in rows] if c else [] for name, c in columns.items()}
        )
