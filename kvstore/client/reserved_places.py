"""Space in the pool that a client has ahead, for puts of one value in one request.

    take ─▶ bytes are written ─▶ Store ─▶ give: the next places of this size, from the reply
      │                            └────▶ abandon: no reply came; nothing is written there again
      └▶ one is left: others are ordered, and named again by the `Store` that uses the last
    unused for a moment, the client's end ─▶ given back

Places come from the master, are of one size each and of one master, and must not be written for
longer than half of what the master waits: after that its space may be somebody else's.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.client.post_box import NEVER
from kvstore.client.writes_under_way import Target
from kvstore.errors import KVStoreError
from kvstore.wire import messages as m

if TYPE_CHECKING:
    from transfer import RegionKey
    from transfer.prepared import InPlace

logger = logging.getLogger(__name__)

IDLE_S: Final = 0.5
HELD_BYTES_MAX: Final = 32 << 20
HELD_MAX: Final = 64  # of one size
UNTOLD_MAX: Final = 1024
GIVE_BACK_S: Final = 1.0  # an unreachable master is not waited for longer

Kind = tuple[int, int]  # shard, space


class ReservedPlace(NamedTuple):
    """Where one value may be written.

    Attributes:
        where: The segment.
        offset: In it.
        space: Bytes there.
        batch: The place's number.
        until_s: Nothing is begun to be written after this, on the monotonic clock.
        generation: Of the posts of its master; see `PostBoxes.generation`.
    """

    where: m.NodeAddress
    offset: int
    space: int
    batch: int
    until_s: float
    generation: int


class Order(NamedTuple):
    """Places that the master opens, or has opened.

    Attributes:
        numbers: Theirs.
        since_s: It was asked after that time.
        generation: From before that; see `PostBoxes.generation`.
    """

    numbers: Sequence[int]
    since_s: float
    generation: int = NEVER


class Wanted(NamedTuple):
    """Numbers of places that a `Store` asks for.

    Attributes:
        more: With its reply.
        soon: For the one that uses the last place that is left; see `ReservedPlaces.order`.
        since_s: When the places `more` may have been opened first; None: not before it is sent.
    """

    more: Sequence[int] = ()
    soon: Sequence[int] = ()
    since_s: float | None = None


NOTHING: Final = Wanted()
_NO_ORDER: Final = Order((), 0.0)


class ReservedPlaces:
    """Thread-safe. A thread gives back what is not used; it runs while something is held.

    Args:
        ask: Sends a request to the master, within so many seconds. May raise KVStoreError.
        client: The client's incarnation.
        idle_s: What is not used for so long is given back; None: `IDLE_S`.
    """

    def __init__(
        self,
        ask: Callable[[m.Reserve, float], m.Reserved],
        client: str,
        *,
        idle_s: float | None = None,
    ) -> None:
        self._ask = ask
        self._idle_s = idle_s
        self._client = client
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._places: dict[Kind, list[ReservedPlace]] = {}
        self._used_s: dict[Kind, float] = {}
        self._keys: dict[int, bytes] = {}  # any key of each shard
        self._untold: dict[int, list[int]] = {}  # shard -> numbers that are over
        self._ordered: dict[Kind, Order] = {}
        self._held_bytes = 0
        # Segments mapped here; forgotten often, lest that of a node be kept that is gone.
        self.mapped: dict[Target, tuple[RegionKey, InPlace | None]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, shard: int, space: int) -> tuple[ReservedPlace | None, int]:
        """Return a place that nobody else writes into, for one put, and how many are left."""
        kind = shard, space
        with self._lock:
            places = self._places.get(kind)
            if not places:
                return None, 0
            now = time.monotonic()
            place = places.pop()
            self._held_bytes -= space
            self._used_s[kind] = now
            if place.until_s > now:
                return place, len(places)
            self._end(shard, place.batch)
            return None, 0

    def take_many(self, shard: int, space: int, count: int) -> list[ReservedPlace]:
        """Return so many places as `take` does, or as many as are held."""
        kind = shard, space
        with self._lock:
            held = self._places.get(kind)
            if not held:
                return []
            now = time.monotonic()
            taken, held[-count:] = held[-count:], []
            self._held_bytes -= space * len(taken)
            self._used_s[kind] = now
            for place in taken:
                if place.until_s <= now:
                    self._end(shard, place.batch)
            return [place for place in taken if place.until_s > now]

    @property
    def idle_s(self) -> float:
        """What is not used for so long is given back."""
        return IDLE_S if self._idle_s is None else self._idle_s

    @property
    def room_bytes(self) -> int:
        """How much more may be held."""
        return HELD_BYTES_MAX - self._held_bytes

    def bytes_of(self, shard: int, space: int) -> int:
        """How much is held of one size."""
        return space * len(self._places.get((shard, space), ()))

    def meet(self, shard: int, key: bytes) -> None:
        """Name any key of a master's, to tell it by what is given back."""
        self._keys.setdefault(shard, key)

    def give(self, shard: int, places: Sequence[ReservedPlace]) -> None:
        """Keep places of one size for later puts."""
        with self._lock:
            for place in places:
                kept = self._places.get((shard, place.space), [])
                full = self._held_bytes + place.space > HELD_BYTES_MAX or len(kept) >= HELD_MAX
                if self._closed or full:
                    self._end(shard, place.batch)
                    continue
                kept.append(place)
                self._places[shard, place.space] = kept
                self._held_bytes += place.space
                self._used_s.setdefault((shard, place.space), time.monotonic())
            self._watch()

    def wanted(
        self, shard: int, space: int, left: int, count: int, number: Callable[[], int]
    ) -> Wanted:
        """Say what to ask for with a `Store` from which on so many places are left.

        Args:
            shard: Of the master.
            space: Of the places.
            left: See `take`.
            count: How many are asked for at once.
            number: Gives a new number.
        """
        if left > 1 or (left and (shard, space) in self._ordered):
            return NOTHING
        if left:
            return Wanted(soon=[number() for _ in range(count)])
        with self._lock:
            ordered = self._ordered.pop((shard, space), None)
        if ordered is None:
            return Wanted(more=[number() for _ in range(count)])
        return Wanted(more=ordered.numbers, since_s=ordered.since_s)

    def ordered(self, shard: int, space: int) -> Order | None:
        """Return what is ordered of a size."""
        return self._ordered.get((shard, space))

    def collect(self, shard: int, space: int, order: Order, places: Sequence[ReservedPlace]) -> int:
        """Keep what was opened of an order; return how many places of the size are held then.

        Args:
            shard: Of the master.
            space: Of the places.
            order: Theirs. Another thread may have collected it: then these are there already.
            places: Of the first of its numbers.
        """
        kind = shard, space
        with self._lock:
            is_ours = self._ordered.get(kind) is order
            if is_ours:
                del self._ordered[kind]
        if is_ours:
            self.give(shard, places)
        return len(self._places.get(kind, ()))

    def order(self, shard: int, space: int, order: Order) -> None:
        """The master opens these, or has."""
        kind = shard, space
        with self._lock:
            if self._closed or kind in self._ordered:
                for number in order.numbers:
                    self._end(shard, number)
            else:
                self._ordered[kind] = order
                self._places.setdefault(kind, [])
                self._used_s.setdefault(kind, time.monotonic())
            self._watch()

    def reserve(
        self, request: m.Reserve, shard: int, space: int, generation: int
    ) -> ReservedPlace | None:
        """Ask for a place; None if there is none. Raises KVStoreError.

        Args:
            request: Names it.
            shard: Of the master.
            space: Of the place.
            generation: From before this.
        """
        with self._lock:
            if self._closed:
                return None
            self._keys[shard] = request.key
        asked_s = time.monotonic()
        try:
            reply = self._ask(request, GIVE_BACK_S)
        except KVStoreError:
            self.abandon(shard, request.batch)
            raise
        self.told(shard, request.abandoned)
        if reply.place is None:
            return None
        until_s = asked_s + reply.put_s / 2
        where, offset = reply.place.where, reply.place.offset
        return ReservedPlace(where, offset, space, request.batch, until_s, generation)

    def abandon(self, shard: int, *batches: int) -> None:
        """Nothing is or will be written into these; the master is told with the next request."""
        with self._lock:
            for batch in batches:
                self._end(shard, batch)
            self._watch()

    def untold(self, shard: int) -> list[int]:
        """Return the numbers that are over and that this master has not been told."""
        untold = self._untold.get(shard)
        return list(untold) if untold else []

    def told(self, shard: int, batches: list[int]) -> None:
        """The master knows of these."""
        if batches:
            with self._lock:
                left = set(self._untold.get(shard, ())).difference(batches)
                self._untold[shard] = sorted(left)

    def let_go(self, target: Target) -> None:
        """Use no place in a segment that is held now; see `WritesUnderWay.on_question`.

        Nor any that was ordered before now: who granted it may lead no more, and its grant would
        still be read where it lies, as its places may be anywhere.
        """
        with self._lock:
            self._drop_where(lambda place: (place.where.node, place.where.segment) == target)
            for kind, order in self._ordered.items():
                for number in order.numbers:
                    self._end(kind[0], number)
            self._ordered.clear()
            self._watch()

    def close(self) -> None:
        """Give everything back, and end the thread. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop(math.inf)
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self.mapped.clear()

    # -- what is not used; the lock is held but in `_run` and `_tell_all` ------------------------

    def _end(self, shard: int, batch: int) -> None:
        self._untold[shard] = [*self._untold.get(shard, ()), batch][-UNTOLD_MAX:]

    def _drop(self, unused_since_s: float) -> None:
        for kind in [kind for kind, used_s in self._used_s.items() if used_s <= unused_since_s]:
            del self._used_s[kind]
            for place in self._places.pop(kind):
                self._held_bytes -= place.space
                self._end(kind[0], place.batch)
            for number in self._ordered.pop(kind, _NO_ORDER).numbers:
                self._end(kind[0], number)

    def _drop_where(self, unwanted: Callable[[ReservedPlace], bool]) -> None:
        for kind, places in self._places.items():
            for place in [place for place in places if unwanted(place)]:
                places.remove(place)
                self._held_bytes -= place.space
                self._end(kind[0], place.batch)

    def _watch(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="store-places", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._closed:
                    self._changed.wait(self.idle_s)
                closed, now = self._closed, time.monotonic()
                self.mapped.clear()
                self._drop(now - self.idle_s)
                # Of a size in use the youngest is taken first: others may grow too old.
                self._drop_where(lambda place: place.until_s <= time.monotonic())
                if not closed and not self._places and not any(self._untold.values()):
                    self._thread = None
                    return
            self._tell_all()
            if closed:
                return

    def _tell_all(self) -> None:
        with self._lock:
            untold = {shard: list(batches) for shard, batches in self._untold.items() if batches}
        for shard, batches in untold.items():
            key = self._keys[shard]
            try:
                self._ask(m.Reserve(self._client, key, abandoned=batches), GIVE_BACK_S)
            except KVStoreError as error:
                logger.debug("places %s not given back: %s", batches, error)
                continue
            self.told(shard, batches)
