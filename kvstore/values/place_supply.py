"""Sees to places for the puts to come: asks for them in time, and keeps what is given.

32 left ... 24 left ─▶ an order is posted; the master opens places beside the puts that follow
none left ─▶ the last put is asked for, and its reply names what was ordered
no order could be posted: the last put but one orders, and waits for its own reply
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.client.post_box import NEVER
from kvstore.client.reserved_places import NOTHING, Order, ReservedPlace
from kvstore.errors import Fenced, KVStoreError
from kvstore.wire import messages as m
from kvstore.wire.granted import decode
from kvstore.wire.messages import PutOutcome

if TYPE_CHECKING:
    from kvstore._native import PostBox
    from kvstore.client.client_core import ClientCore
    from kvstore.client.post_box import PostBoxes
    from kvstore.client.reserved_places import ReservedPlaces
    from kvstore.values.quick_value import QuickValue

logger = logging.getLogger(__name__)

AHEAD_BYTES: Final = 4 << 20
AHEAD_MAX: Final = 32  # places that are asked for at once
ORDER_SHARE: Final = 3 / 4  # of them: while so many are left others are opened


class Asked(NamedTuple):
    """What the master was asked.

    Attributes:
        request: For a block, and perhaps for further places.
        since_s: When these may have been opened first.
        generation: Theirs; see `PostBoxes.generation`.
    """

    request: m.Store
    since_s: float = 0.0
    generation: int = NEVER


class PlaceSupply:
    """Thread-safe.

    Args:
        core: The client's operations.
        places: Held ahead.
        posts: Where orders are posted.
    """

    def __init__(self, core: ClientCore, places: ReservedPlaces, posts: PostBoxes) -> None:
        self._core = core
        self._places = places
        self._posts = posts

    def reserve(self, value: QuickValue) -> ReservedPlace | None:
        """Ask for a place for this value; None if there is none. Raises Fenced."""
        record, shard, space = self._core.record, value.shard, value.space
        request = m.Reserve(
            record.name, value.key, record.next_batch(), space, record.avoided(),
            self._places.untold(shard),
        )  # fmt: skip
        try:
            return self._places.reserve(request, shard, space, self._posts.generation())
        except Fenced:
            raise
        except KVStoreError as error:
            logger.debug("no place: %s", error)
            return None

    def see_to(self, value: QuickValue, left: int) -> int:
        """Order places for such values if it is time; where none is left, keep what was opened.

        Args:
            value: To be put.
            left: So many places are held, beside the one that it goes to.

        Returns:
            How many are held then.
        """
        box, order = self._posts.box, self._places.ordered(value.shard, value.space)
        if box is None:
            return left
        if order is not None:
            return left or self._collect(value, order, box)
        count = _count_ahead(value.space)
        if 0 < left <= count * ORDER_SHARE:
            self._order(value, count, box)
        return left

    def _order(self, value: QuickValue, count: int, box: PostBox) -> None:
        since_s, generation = time.monotonic(), box.generation()
        number = self._core.record.next_batch
        numbers = [number() for _ in range(count)]
        if numbers[-1] - numbers[0] >= count:
            return  # another thread took numbers in between
        if box.order(numbers[0], count, value.nbytes):
            order = Order(numbers, since_s, generation)
            self._places.order(value.shard, value.space, order)

    def _collect(self, value: QuickValue, order: Order, box: PostBox) -> int:
        payload = box.granted(order.numbers[0], value.nbytes)
        if payload is None:
            return 0
        granted, space = decode(payload), value.space
        until_s, nodes = order.since_s + granted.put_s / 2, granted.nodes
        opened = zip(granted.node_idx, granted.offsets, order.numbers, strict=False)
        places = [
            ReservedPlace(nodes[idx], offset, space, number, until_s, order.generation)
            for idx, offset, number in opened
        ]
        return self._places.collect(value.shard, space, order, places)

    def request(
        self, value: QuickValue, place: ReservedPlace, checksum: int, left: int, generation: int
    ) -> Asked:
        """Return what tells the master of a value, and asks for further places.

        Args:
            value: Was written, and noted.
            place: Where.
            checksum: Its own.
            left: How many places are held beside.
            generation: Of those that the reply will bring.
        """
        record, options = self._core.record, value.options
        following, wanted = record.next_batch(), NOTHING
        if left <= 1:
            count, number = _count_ahead(place.space), record.next_batch
            wanted = self._places.wanted(value.shard, place.space, left, count, number)
        request = m.Store(
            record.name, place.batch, value.key, value.nbytes, checksum, following,
            list(wanted.more), options.pin, options.pin_s, options.group, record.avoided(),
            self._places.untold(value.shard), list(wanted.soon),
        )  # fmt: skip
        since_s = time.monotonic() if wanted.since_s is None else wanted.since_s
        return Asked(request, since_s, generation)

    def keep(self, shard: int, place: ReservedPlace, asked: Asked, reply: m.Stored) -> None:
        """Take the places that a reply names.

        Args:
            shard: Of the master.
            place: Of what was asked for.
            asked: The request.
            reply: What it brought.
        """
        places, request = self._places, asked.request
        if request.abandoned:
            places.told(shard, request.abandoned)
        if request.soon:
            if reply.outcome is PutOutcome.STORED:
                places.order(shard, place.space, Order(request.soon, asked.since_s))
            else:
                places.abandon(shard, *request.soon)
        if reply.more:
            until_s = asked.since_s + reply.put_s / 2
            granted = zip(reply.more, request.more, strict=False)
            places.give(
                shard,
                [
                    ReservedPlace(p.where, p.offset, place.space, n, until_s, asked.generation)
                    for p, n in granted
                ],
            )
        if reply.place is not None:
            places.give(shard, [place._replace(batch=request.following)])

    def lose(self, shard: int, request: m.Store) -> None:
        """Nothing is known of the places of a request: nothing is or will be written there."""
        self._places.abandon(shard, request.batch, request.following, *request.more, *request.soon)


def _count_ahead(space: int) -> int:
    """Return how many places of a size are asked for at once."""
    return min(AHEAD_MAX, max(1, AHEAD_BYTES // space))
