"""A client's operations on blocks as steps, for whoever drives them; arguments are checked here.

StoreClient, Store ──▶ Driver ─────┐
                                   ├──▶ ClientCore ──▶ Reading, Writing ──▶ master, nodes
AsyncStoreClient  ──▶ AsyncDriver ─┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.client.block_reader import BlockReader, Copied
from kvstore.client.block_writer import BlockWriter
from kvstore.client.client_record import ClientRecord
from kvstore.client.disk_places import DiskPlaces
from kvstore.client.locations import Hit
from kvstore.client.master_access import MasterAccess
from kvstore.client.pieces import Ints, Pieces
from kvstore.client.put_options import PutOptions, check_options
from kvstore.client.reading import Reading
from kvstore.client.source import chunked_source, plain_source
from kvstore.client.staging import Staging
from kvstore.client.steps import Steps, work
from kvstore.client.tenant import Tenant
from kvstore.client.writing import Writing
from kvstore.errors import InvalidKey, InvalidValue, MasterUnavailable
from kvstore.events.chains import Link
from kvstore.keys import KEY_BYTES
from kvstore.timeouts import check_timeout
from kvstore.wire import messages as m
from kvstore.wire.messages import PutOutcome

if TYPE_CHECKING:
    from kvstore.client.post_box import PostBoxes
    from kvstore.client.reserved_places import ReservedPlaces
    from kvstore.client.segment_keys import SegmentKeys
    from transfer import TransferEngine

logger = logging.getLogger(__name__)

UNHEARD_S: Final = 10.0  # masters without events are not told again what blocks are for so long


class ClientCore:
    """Thread-safe; operations of several threads and tasks may be under way at once.

    Args:
        engine: Moves the bytes.
        segments: Keys to the nodes' segments.
        tenant: For whom it acts.
        timeout_s: Deadline of a call that names none.
        posts: Where puts are posted.
        disk_places: Keeps places on disks; None: none are had ahead.
    """

    def __init__(
        self,
        engine: TransferEngine,
        segments: SegmentKeys,
        *,
        tenant: Tenant,
        timeout_s: float,
        posts: PostBoxes,
        disk_places: ReservedPlaces | None = None,
    ) -> None:
        self.engine = engine
        self.tenant = tenant
        self.record = ClientRecord(engine.name)
        self.staging = Staging(engine)
        self.master = MasterAccess(engine.name, tenant)
        self._timeout_s = timeout_s
        self._unheard_until_s = 0.0  # the masters have no subscribers of events
        reader = BlockReader(engine, segments, self.staging)
        self.reading = Reading(self.record, self.master, reader)
        self.under_way = segments.under_way
        writer = BlockWriter(engine, segments)
        ahead = None if disk_places is None else DiskPlaces(disk_places, self.record)
        self.writing = Writing(self.record, self.master, writer, self.under_way, posts, ahead)

    def deadline(self, timeout_s: float | None) -> float:
        """When a call that starts now is late, on the monotonic clock. Raises InvalidValue."""
        check_timeout(timeout_s)
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def left(self, deadline_s: float) -> float:
        """Seconds until a deadline, a little if it has passed."""
        return max(0.001, deadline_s - time.monotonic())

    def lookup(self, keys: Sequence[bytes], *, every: bool, timeout_s: float | None) -> Steps[Hit]:
        """As `StoreClient.lookup`, or `lookup_prefix` unless `every`."""
        check_timeout(timeout_s)
        names = self.names(keys if every else keys[: m.KEYS_MAX])
        return (yield from self.reading.locate(names, every=every, timeout_s=timeout_s))

    def copy(self, hit: Hit, pieces: Pieces, timeout_s: float | None) -> Steps[Copied]:
        """As `StoreClient.copy`."""
        deadline_s = self.deadline(timeout_s)
        if not len(pieces):
            return Copied(num_good=hit.num_blocks, corrupt=(), unreached=(), lost_nodes=())
        return (yield from self.reading.copy(hit, pieces, deadline_s=deadline_s))

    def exists(self, keys: Sequence[bytes], timeout_s: float | None) -> Steps[list[bool]]:
        """As `StoreClient.exists`."""
        check_timeout(timeout_s)
        return (yield from self.reading.exists(self.names(keys), timeout_s=timeout_s))

    def put(
        self,
        keys: Sequence[bytes],
        pieces: Pieces,
        options: PutOptions,
        timeout_s: float | None,
    ) -> Steps[tuple[PutOutcome, ...]]:
        """As `StoreClient.put_pieces`."""
        check_options(options)
        deadline_s = self.deadline(timeout_s)
        if not keys:
            return ()
        names = self.names(keys)
        check_complete(pieces, len(names))
        if options.chain is not None:
            yield from self.describe(keys, options.chain.links(keys), deadline_s)
        if options.chunk_bytes or options.pin is not m.Pin.NONE:
            yield from work(pieces.nbytes)  # its checksums
        if not options.chunk_bytes:
            source = plain_source(names, pieces, options, self.tenant.name)
            return tuple((yield from self.writing.put(source, deadline_s=deadline_s)))
        source, tables = chunked_source(names, pieces, options, self.tenant.name, self.engine)
        try:
            return tuple((yield from self.writing.put(source, deadline_s=deadline_s)))
        finally:
            self.engine.release(tables)

    def describe(
        self, keys: Sequence[bytes], links: Sequence[Link], deadline_s: float
    ) -> Steps[None]:
        """Tell the master what blocks are that are put next, if it has subscribers of events.

        A master that does not answer is no error: then its events name no parents and tokens.
        """
        if not keys or time.monotonic() < self._unheard_until_s:
            return
        salted = iter(self.names([link.parent for link in links if link.parent is not None]))
        parents = [b"" if link.parent is None else next(salted) for link in links]
        tokens = [link.tokens for link in links]
        request = m.Describe(self.record.name, self.names(keys), parents, tokens)
        try:
            done = yield from self.master.ask(request, m.Done, timeout_s=self.left(deadline_s))
        except MasterUnavailable as error:
            logger.debug("events will not tell what %s blocks are: %s", len(keys), error)
            return
        if not done.count:
            self._unheard_until_s = time.monotonic() + UNHEARD_S

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        """Check keys, and return them as the pool knows them.

        Raises:
            InvalidKey: Not of 16 bytes, or more than `KEYS_MAX`.
        """
        if len(keys) > m.KEYS_MAX:
            raise InvalidKey(problem=f"{len(keys)} in one call, at most {m.KEYS_MAX}")
        if not set(map(type, keys)) <= {bytes} or not set(map(len, keys)) <= {KEY_BYTES}:
            wrong = next(k for k in keys if type(k) is not bytes or len(k) != KEY_BYTES)
            raise InvalidKey(problem=f"a key has {KEY_BYTES} bytes, got {wrong!r:.40}")
        return self.tenant.salted(keys)


def check_complete(pieces: Pieces, num_blocks: int) -> None:
    """Raise InvalidValue unless the pieces are blocks `0 .. num_blocks - 1`, without gaps."""
    pieces.check()
    if any(region.kind != "host" for region in pieces.regions):
        raise InvalidValue(problem="blocks are put from host memory")
    if pieces.one_each and len(pieces) == num_blocks:
        return
    found = np.unique(pieces.blocks)
    if not len(found) or len(found) != num_blocks or int(found[-1]) != num_blocks - 1:
        raise InvalidValue(problem=f"{num_blocks} keys, but pieces of {len(found)} blocks")
    if (np.diff(pieces.blocks) < 0).any() or (pieces.starts != _running_starts(pieces)).any():
        raise InvalidValue(problem="the pieces of a block must follow one another")


def _running_starts(pieces: Pieces) -> Ints:
    """Where each piece starts in its block if they follow one another."""
    ends = np.cumsum(pieces.lengths)
    begins = ends - pieces.lengths
    first = np.searchsorted(pieces.blocks, pieces.blocks)
    return begins - begins[first]
