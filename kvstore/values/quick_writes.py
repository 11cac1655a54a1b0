"""Puts of one value in one request: the shortest way, where nothing is unusual.

put ─▶ a place is held ahead ─▶ copy and checksum ─▶ Written to the node ─▶ Store ─▶ outcome
    └▶ none: ask for one if the last puts were of this size        anything else: the long way

Where the segment is mapped here, one pass over the value copies it and computes the checksum of
what was stored. The long way asks first and sends nothing for a name that is taken; so after such
an outcome puts of that size go the long way until one is stored again.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from kvstore.client.put_options import PutOptions, is_plain
from kvstore.client.steps import Steps, ask, work
from kvstore.copying import copy_with_checksum
from kvstore.errors import KVStoreError, MasterRefused, NodeUnreachable
from kvstore.shards.plan import shard_of
from kvstore.values.place_supply import Asked, PlaceSupply
from kvstore.values.plain_puts import TAKEN, PlainPuts, Written
from kvstore.values.quick_value import QuickValue, decoded, space_of
from kvstore.values.sent_values import send_value
from kvstore.values.values import Part, RegionPiece
from kvstore.wire import messages as m
from kvstore.wire.messages import Pin, PutOutcome
from kvstore.wire.peer_messages import Unwritten
from transfer import TransferError

if TYPE_CHECKING:
    from kvstore.client.client_core import ClientCore
    from kvstore.client.master_map import MasterMap
    from kvstore.client.post_box import PostBoxes
    from kvstore.client.reserved_places import ReservedPlace, ReservedPlaces
    from kvstore.client.segment_keys import SegmentKeys
    from kvstore.client.writes_under_way import WriteUnderWay
    from kvstore.wire.left_notes import Row
    from transfer import RegionKey
    from transfer.prepared import InPlace

logger = logging.getLogger(__name__)

QUICK_BYTES_MAX: Final = 16 << 20  # above, a request more does not matter
SENT_BYTES_MAX: Final = 4 << 20  # to memory that is not mapped here: without the call's deadline
STAGED_BYTES_MAX: Final = 256 << 10  # of what is neither registered nor copied within the host
SIZES_MAX: Final = 8
PAUSE_S: Final = 1.0  # after a place was refused
REACH_S: Final = 5.0
SLOW: Final = 1 << 30  # as many bytes as nobody copies in an event loop


class QuickWrites:
    """Thread-safe.

    Args:
        core: The client's operations.
        link: The way to the masters.
        segments: Keys to the nodes' segments.
        places: Held ahead.
        posts: Where puts are posted.
    """

    def __init__(
        self,
        core: ClientCore,
        link: MasterMap,
        segments: SegmentKeys,
        places: ReservedPlaces,
        posts: PostBoxes,
    ) -> None:
        self._core = core
        self._link = link
        self._segments = segments
        self._places = places
        self._shards = link.num_shards
        self._posts = posts
        self._supply = PlaceSupply(core, places, posts)
        self._plain = PlainPuts(core, segments, places, self._shards)
        self._sizes: dict[int, None] = {}  # of what was stored last, the oldest first
        self._paused_until_s = 0.0

    def put(
        self, key: bytes, part: Part, options: PutOptions, timeout_s: float | None
    ) -> PutOutcome | None:
        """Store one value; None, or FAILED after its bytes were written, if the long way must.

        Args:
            key: Not salted yet.
            part: All of its bytes.
            options: How to store it.
            timeout_s: For the request to the master.

        Raises:
            MasterUnavailable: It did not answer.
            Fenced: This incarnation is out of the cluster.
        """
        if not self.expects(part.nbytes, options):
            return None
        if isinstance(part, RegionPiece) and part.region.kind != "host":
            return None  # the long way says what is wrong
        value = self._value(key, part, options)
        # Of all segments until the end: the reply may bring a place in any.
        write, box = self._core.under_way.begin(), self._posts.box
        try:
            place, left = self._places.take(value.shard, value.space)
            place = place or self._reserve(value)
            if place is None:
                return None
            left = self._supply.see_to(value, left)
            written, known = None, self._segments.known(place.where)
            if known is not None:
                mapped = self._mapped(place, known)
                written = self._plain.write(value, place, left, mapped, write, box)
            if written is None and box is not None and not box.hold(value.key):
                written = TAKEN
            if written is None:
                checksum = self._write(value, place, write)
            elif written.posted:
                box = None
                self._core.record.count_stored()
                return PutOutcome.STORED
            elif written.taken:
                box = None
                self._leave(value, place)
                return None
            elif written.request is not None:
                return self._put_plainly(value.shard, place, written.request, timeout_s)
            else:
                checksum = written.checksum if self._note(value, place, written.checksum) else None
            if checksum is None:
                return None
            asked = self._supply.request(value, place, checksum, left, self._posts.generation())
            try:
                reply = self._link.ask(asked.request, m.Stored, timeout_s=timeout_s)
            except KVStoreError as error:
                return self._not_stored(value.shard, asked.request, error)
            return self._stored(value.shard, place, asked, reply)
        finally:
            if box is not None:
                box.let_go(value.key)
            write.end()

    def _leave(self, value: QuickValue, place: ReservedPlace) -> None:
        """Leave a key that is taken to the long way, which writes nothing before it has asked.

        A note of what is written would be found beside the one of whoever has posted the key,
        should the master end before it answers.
        """
        self._places.give(value.shard, [place])

    def _put_plainly(
        self, shard: int, place: ReservedPlace, payload: bytes, timeout_s: float | None
    ) -> PutOutcome | None:
        """Ask the master to make a block of what was written and noted; see `PlainPuts`."""
        try:
            reply = self._link.ask_encoded(payload, timeout_s=timeout_s)
        except KVStoreError as error:
            return self._not_stored(shard, decoded(payload), error)
        if reply.outcome is PutOutcome.STORED:
            self._core.record.count_stored()
            return PutOutcome.STORED
        return self._stored(shard, place, Asked(decoded(payload)), reply)

    def put_steps(
        self, key: bytes, part: Part, options: PutOptions, timeout_s: float | None
    ) -> Steps[PutOutcome | Written | None]:
        """As `put`, for a driver that waits in its own way; None, too, if `put` would wait.

        That is so without a place that is held ahead, in memory that is mapped here. `TAKEN`: the
        long way must; `put` does no better. What is posted waits for nobody: then it yields nothing
        but `Work`, before the copy.
        """
        if isinstance(part, RegionPiece) and part.region.kind != "host":
            return None
        value = self._value(key, part, options)
        shard = value.shard
        write, box = self._core.under_way.begin(), None
        try:
            place, left = self._places.take(shard, value.space)
            if place is None:
                return None
            known = self._segments.known(place.where)
            mapped = None if known is None else self._mapped(place, known)
            if mapped is None:
                self._places.give(shard, [place])
                return None
            left = self._supply.see_to(value, left)
            yield from work(value.nbytes)
            posts = self._posts.box
            written = self._plain.write(value, place, left, mapped, write, posts)
            if written is None and posts is not None and not posts.hold(value.key):
                written = TAKEN
            if written is not None and written.posted:
                self._core.record.count_stored()
                return PutOutcome.STORED
            if written is not None and written.taken:
                self._leave(value, place)
                return TAKEN
            box = posts
            asked = self._asked_for(value, place, written, left, mapped, write)
            if asked is None:
                return None
            try:
                reply = yield from ask(asked.request, m.Stored, timeout_s=timeout_s)
            except KVStoreError as error:
                return self._not_stored(shard, asked.request, error)
            if reply.outcome is not PutOutcome.STORED:
                yield from work(SLOW)  # a node is told, and perhaps connected to first
            return self._stored(shard, place, asked, reply)
        finally:
            if box is not None:
                box.let_go(value.key)
            write.end()

    def _asked_for(
        self,
        value: QuickValue,
        place: ReservedPlace,
        written: Written | None,
        left: int,
        mapped: InPlace,
        write: WriteUnderWay,
    ) -> Asked | None:
        """Do what is left to do before the master is asked; None if that cannot be done here."""
        if written is not None and written.request is not None:
            return Asked(decoded(written.request))
        checksum = self._copy(value, place, mapped, write) if written is None else written.checksum
        if checksum is None or not self._note(value, place, checksum):
            return None
        return self._supply.request(value, place, checksum, left, self._posts.known_generation())

    def expects(self, nbytes: int, options: PutOptions) -> bool:
        """Tell whether `put` is worth a try."""
        return space_of(nbytes) in self._sizes and is_plain(options)

    def learn(
        self, nbytes: int, options: PutOptions, outcome: PutOutcome, *, again: bool
    ) -> PutOutcome:
        """Take note of what became of a put that went the long way, and return it.

        Args:
            nbytes: Of the value.
            options: How it was to be stored.
            outcome: What became of it.
            again: Its bytes had been written before, by `put`.
        """
        if again and outcome is PutOutcome.EXISTS:  # it was known after all: it is ours
            self._core.record.count(stored_blocks=1, skipped_blocks=-1)
            return PutOutcome.STORED
        usual = outcome is PutOutcome.STORED and nbytes <= QUICK_BYTES_MAX and is_plain(options)
        if usual and time.monotonic() >= self._paused_until_s:
            self._sizes[space_of(nbytes)] = None
            if len(self._sizes) > SIZES_MAX:
                self._sizes.pop(next(iter(self._sizes)), None)
        return outcome

    def _value(self, key: bytes, part: Part, options: PutOptions) -> QuickValue:
        if self._core.tenant.name:
            (key,) = self._core.tenant.salted((key,))
        shard = 0 if self._shards == 1 else shard_of(key, self._shards)
        return QuickValue(key, shard, part, part.nbytes, space_of(part.nbytes), options)

    def _reserve(self, value: QuickValue) -> ReservedPlace | None:
        place = self._supply.reserve(value)
        if place is None:
            self._sizes.pop(value.space, None)
            self._paused_until_s = time.monotonic() + PAUSE_S
        return place

    def _write(self, value: QuickValue, place: ReservedPlace, write: WriteUnderWay) -> int | None:
        """Write a value, tell the node, and return the checksum; None if it cannot be done here."""
        where = place.where
        try:
            key = self._segments.known(where)
            if key is None:
                key = self._segments.get(where, deadline_s=time.monotonic() + REACH_S)
            mapped = self._mapped(place, key)
        except (NodeUnreachable, TransferError) as error:
            self._lose(place, error)
            self._places.abandon(value.shard, place.batch)
            return None
        if mapped is None and write.may_start((where.node, where.segment)):
            return self._send(value, place, key, write)
        checksum = self._copy(value, place, mapped, write)
        return checksum if checksum is not None and self._note(value, place, checksum) else None

    def _mapped(self, place: ReservedPlace, key: RegionKey) -> InPlace | None:
        """Return the memory of a place's segment if it is mapped here."""
        target = place.where.node, place.where.segment
        known, mapped = self._places.mapped.get(target, (None, None))
        if mapped is None or known is not key or not mapped.live:
            mapped = self._core.engine.in_place(target[0], key)
            self._places.mapped[target] = key, mapped
        return mapped

    def _copy(
        self, value: QuickValue, place: ReservedPlace, mapped: InPlace | None, write: WriteUnderWay
    ) -> int | None:
        """As `_write`, to memory that is mapped here."""
        where, part, start, nbytes = place.where, value.part, place.offset, value.nbytes
        may_start = write.may_start((where.node, where.segment))
        if not may_start or mapped is None or not 0 <= start <= len(mapped.array) - nbytes:
            # Of a master that leads no more; or the long way says what is wrong.
            self._places.abandon(value.shard, place.batch)
            return None
        if isinstance(part, RegionPiece):
            source, first = part.region.array, part.offset
        else:
            source, first = part, 0
        checksum = copy_with_checksum(mapped.array, start, source, first, nbytes)
        mapped.wrote_bytes(nbytes)
        return checksum

    def _send(
        self, value: QuickValue, place: ReservedPlace, key: RegionKey, write: WriteUnderWay
    ) -> int | None:
        """As `_write`, to memory that is not mapped here."""
        where, part = place.where, value.part
        staged = not isinstance(part, RegionPiece)
        if part.nbytes > (STAGED_BYTES_MAX if staged else SENT_BYTES_MAX):
            self._places.abandon(value.shard, place.batch)
            self._sizes.pop(place.space, None)
            self._paused_until_s = time.monotonic() + PAUSE_S
            return None
        try:
            checksum, told = send_value(
                self._core, self._segments, where, key, place.offset, part,
                lambda checksum: self._row(value, place, checksum),
            )  # fmt: skip
        except TransferError as error:
            # Bytes may be under way: the place is left to the master's patience.
            target = where.node, where.segment
            write.granted((target,), put_s=2 * (place.until_s - time.monotonic()))
            write.end((target,))
            self._lose(place, error)
            return None
        return checksum if told or self._note(value, place, checksum) else None

    def _note(self, value: QuickValue, place: ReservedPlace, checksum: int) -> bool:
        """Tell the node what lies there, before the master hears of it; False if that fails."""
        try:
            self._segments.tell_row(place.where, self._row(value, place, checksum))
        except TransferError as error:
            self._lose(place, error)
            self._places.abandon(value.shard, place.batch)
            return False
        return True

    def _row(self, value: QuickValue, place: ReservedPlace, checksum: int) -> Row:
        options = value.options
        return (
            place.offset, value.nbytes, value.key, checksum, options.pin is Pin.HARD, 0,
            self._core.tenant.name, options.group, 0,
        )  # fmt: skip

    def _not_stored(self, shard: int, request: m.Store, error: KVStoreError) -> PutOutcome:
        """Nothing is known of the places; FAILED if the long way may do, else raise the error."""
        self._supply.lose(shard, request)
        if not isinstance(error, MasterRefused):
            raise error
        logger.debug("not stored: %s", error)  # a new master, perhaps, that does not know us
        return PutOutcome.FAILED

    def _stored(
        self, shard: int, place: ReservedPlace, asked: Asked, reply: m.Stored
    ) -> PutOutcome:
        """Take what the master has given, and say what became of the value."""
        record, key, outcome = self._core.record, asked.request.key, reply.outcome
        self._supply.keep(shard, place, asked, reply)
        if outcome is PutOutcome.STORED:
            record.count_stored()
            return outcome
        if outcome is PutOutcome.FAILED:  # repeated, too late, or by a master that knows nothing
            if reply.place is not None:
                self._forget(place, key)
            return outcome
        self._forget(place, key)
        self._sizes.pop(place.space, None)
        record.count(skipped_blocks=1)
        return outcome

    def _forget(self, place: ReservedPlace, key: bytes) -> None:
        """Let the node know that what is written there is no block: its name was taken."""
        where, note = place.where, Unwritten(key, place.offset, place.where.segment)
        try:
            self._segments.say(where, note)
        except TransferError as error:
            self._lose(place, error)
            try:
                self._segments.get(where, deadline_s=time.monotonic() + REACH_S)
                self._segments.say(where, note)
            except (NodeUnreachable, TransferError) as again:
                logger.warning("%s remembers %s: %s", where.node, key.hex(), again)

    def _lose(self, place: ReservedPlace, error: Exception) -> None:
        logger.warning("not written to %s: %s", place.where.node, error)
        self._segments.forget(place.where.node)
        self._core.record.shun([place.where.node])
