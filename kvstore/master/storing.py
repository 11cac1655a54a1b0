"""Puts of one block in one request: into a place that the writer was given ahead.

    Reserve                       place 1
    (bytes are written)  Store 1  a block now; places 2 and 3 of the same size, if they are wanted
    (bytes are written)  Store 2  the name is taken: the same place again, as number 4

A number is used up by its `Store`, whatever becomes of it. So a request that is repeated, or that
arrives late, never makes a block of bytes that were meant for another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore import row_loops
from kvstore.master.abandoned import AbandonedBatches
from kvstore.master.books.allocator import padded
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.open_puts import PutBatch
from kvstore.master.books.tenants import Tenant
from kvstore.master.opening import MORE_MAX, PlaceOpener
from kvstore.master.timing import MasterTiming
from kvstore.master.transition import (
    NEVER,
    UNSIGNED_END,
    Transition,
    malformed,
    not_entered,
)
from kvstore.master.writing import compare
from kvstore.wire import messages as m
from kvstore.wire.granted import Granted

logger = logging.getLogger(__name__)

Post = tuple[str, bytes, int, int, int]  # client, key, number of a place, bytes, checksum


class Wish(NamedTuple):
    """Places that are to be opened.

    Attributes:
        client: For whom.
        numbers: Theirs.
        length: Bytes of the values.
        avoid: Nodes to leave alone.
        poster: Who ordered them by a post; 0: they are named by the reply to a later request.
    """

    client: str
    numbers: Sequence[int]
    length: int
    avoid: Sequence[str]
    poster: int = 0


class Storing:
    """Reserved places; see `MasterPart`.

    Args:
        catalog: The pool's books.
        timing: The master's durations.
        abandoned: Batches that writers gave up.
        opener: Opens places.

    Attributes:
        granted: What is to be told to posters: what each ordered, and what it got. Empty it.
    """

    def __init__(
        self,
        catalog: Catalog,
        timing: MasterTiming,
        abandoned: AbandonedBatches,
        opener: PlaceOpener,
    ) -> None:
        self._catalog = catalog
        self._timing = timing
        self._abandoned = abandoned
        self._opener = opener
        self._wished: list[Wish] = []
        self.granted: list[tuple[Wish, Granted]] = []
        # What is said to nearly all: the same object, so that it is encoded once.
        self._plainly_stored = m.Stored(m.PutOutcome.STORED, None, [], timing.put_s)

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {m.Reserve: self._reserve, m.Store: self._store}

    def advance(self, now: float) -> float:
        """Nothing is due here: `Writing` quarantines what is reserved for too long."""
        return NEVER

    @property
    def has_wishes(self) -> bool:
        """Whether places are to be opened before the next request is looked at."""
        return bool(self._wished)

    def grant_wishes(self, now: float) -> None:
        """Open what was wanted soon; what was given up since then is left out."""
        wished, self._wished = self._wished, []
        for wish in wished:
            tenant = self._catalog.tenants.acting(wish.client)
            if tenant is not None:
                self._opener.open(wish.client, wish.numbers, wish.length, wish.avoid, tenant, now)
                if wish.poster:
                    granted = self._opener.granted(wish.client, wish.numbers)
                    self.granted.append((wish, granted))

    def take_order(self, client: str, first: int, count: int, length: int, poster: int) -> None:
        """Have places opened soon; what is not legal is not opened."""
        if 0 < count <= MORE_MAX and length > 0:
            numbers = range(first, first + count)
            self._wished.append(Wish(client, numbers, length, (), poster))

    def take_posts(self, posts: Sequence[Post]) -> None:
        """Make blocks of places that their clients have filled, under keys that are free.

        Both are known to be so; where they are not, somebody has written where he should not.
        """
        catalog, found = self._catalog, self._catalog.puts.find
        batches: list[PutBatch] = []
        rows: list[int] = []
        good: list[Post] = []
        keys: set[bytes] = set()
        places: set[int] = set()
        for post in posts:
            batch = found(post[0], post[2])
            row = None if batch is None else catalog.puts.reserved(batch)
            if batch is None or row is None or row in places:
                logger.error("%s posted a put into place %d, not its own", post[0], post[2])
                continue
            places.add(row)
            if not self._is_legal(post, row) or post[1] in keys:
                logger.error("%s posted a put of %s that cannot be one", post[0], post[1].hex())
                catalog.end_batch(batch, at_rest=True)
                continue
            keys.add(post[1])
            batches.append(batch)
            rows.append(row)
            good.append(post)
        if rows:
            _, names, _, lengths, checksums = zip(*good, strict=True)
            row_loops.scatter(catalog.table.length, rows, lengths)
            row_loops.scatter(catalog.table.checksum, rows, checksums)
            catalog.store_all(batches, rows, list(names))

    def _is_legal(self, post: Post, row: int) -> bool:
        catalog, (_, key, _, length, _) = self._catalog, post
        free = key not in catalog.index.rows and key not in catalog.puts.writers
        return free and length > 0 and catalog.table.space[row] == padded(length)

    def _reserve(self, request: m.Reserve, now: float) -> m.Reply:
        client, puts = request.client, self._catalog.puts
        tenant = self._catalog.tenants.acting(client)
        if tenant is None:
            return not_entered(client)
        self._abandoned.end(client, request.abandoned)
        batch = puts.find(client, request.batch)
        if request.nbytes and batch is None:
            numbers = (request.batch,)
            self._opener.open(client, numbers, request.nbytes, request.avoid, tenant, now)
            batch = puts.find(client, request.batch)
        return m.Reserved(self._place(batch), self._timing.put_s)

    def _store(self, request: m.Store, now: float) -> m.Reply:
        catalog, client = self._catalog, request.client
        puts, table = catalog.puts, catalog.table
        problem = _problem(request)
        if problem:
            return malformed(problem)
        tenant = catalog.tenants.acting(client)
        if tenant is None:
            return not_entered(client)
        if request.abandoned:
            self._abandoned.end(client, request.abandoned)
        batch = puts.find(client, request.batch)
        row = None if batch is None else puts.reserved(batch)
        if (
            batch is None
            or row is None
            or puts.find(client, request.following) is not None
            or table.tenant[row] != tenant.number
            or table.space[row] != padded(request.length)
        ):
            if batch is not None and batch.is_reserved:
                catalog.end_batch(batch, at_rest=True)  # its writer says so
            return self._stored(request, m.PutOutcome.FAILED)
        outcome = self._commit(request, batch, row, tenant, now)
        if outcome is not m.PutOutcome.STORED:
            if (client, request.following) in self._abandoned:
                catalog.end_batch(batch, at_rest=True)
            else:
                puts.renumber(batch, request.following)
        else:
            if request.more:
                self._opener.open(client, request.more, request.length, request.avoid, tenant, now)
            if request.soon:
                self._wished.append(Wish(client, request.soon, request.length, request.avoid))
            if not request.more:  # as nearly always; `following` names nothing
                return self._plainly_stored
        return self._stored(request, outcome)

    def _commit(
        self, request: m.Store, batch: PutBatch, row: int, tenant: Tenant, now: float
    ) -> m.PutOutcome:
        """Make the place a block if its name is free; else leave it as it is."""
        catalog, table, key = self._catalog, self._catalog.table, request.key
        found = catalog.index.rows.get(key)
        if found is not None:
            wanted = (request.length, request.checksum, 0, tenant.number)
            outcome = compare(catalog, found, wanted)
            if outcome is m.PutOutcome.EXISTS and request.pin is not m.Pin.NONE:
                catalog.pins.strengthen(found, request.pin, request.pin_s, now)
            return outcome
        if key in catalog.puts.writers:
            return m.PutOutcome.IN_PROGRESS
        table.length[row] = request.length
        table.checksum[row] = request.checksum
        if request.pin is m.Pin.NONE and not request.group:  # as nearly always
            catalog.store(batch, row, key)
            return m.PutOutcome.STORED
        catalog.puts.name(row, key)
        batch.pin, batch.pin_s, batch.group = request.pin, request.pin_s, request.group
        stored = catalog.commit(batch, 0, now)
        assert stored, key
        return m.PutOutcome.STORED

    def _stored(self, request: m.Store, outcome: m.PutOutcome) -> m.Stored:
        """Say which of the places that a request names are the writer's now."""
        find, client = self._catalog.puts.find, request.client
        unused = self._place(find(client, request.following))
        more: list[m.Place] = []
        for number in request.more:
            place = self._place(find(client, number))
            if place is None:
                break
            more.append(place)
        return m.Stored(outcome, unused, more, self._timing.put_s)

    def _place(self, batch: PutBatch | None) -> m.Place | None:
        """Return where a reserved batch is to be written."""
        row = None if batch is None else self._catalog.puts.reserved(batch)
        if row is None:
            return None
        return m.Place(self._catalog.pool.of(row).where, self._catalog.table.offset[row])


def _problem(request: m.Store) -> str:
    """Say what is illegal about a request, if anything."""
    if request.length <= 0 or not 0 <= request.checksum < UNSIGNED_END:
        return "a block of no bytes, or a checksum that is not an unsigned 64-bit number"
    wanted = (*request.more, *request.soon)
    if not wanted and request.batch != request.following:  # as nearly always
        return ""
    if len(wanted) > MORE_MAX:
        return f"{len(wanted)} places at once"
    numbers = {request.batch, request.following, *wanted}
    if len(numbers) < 2 + len(wanted):
        return "a number that is used twice"
    return ""
