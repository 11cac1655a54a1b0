"""The store as its users see it: look up, copy in, put. Bytes move one-sided, past the master.

lookup_prefix   keys ─▶ master: longest run that is there, leased in the same step
get_into        run ─▶ one read per segment into the caller's region ─▶ checksums
put             allocate at the master ─▶ one write per segment ─▶ commit at the master

Here blocks are columns in registered memory; `Store` takes and gives values of any kind.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.client.block_reader import Copied
from kvstore.client.block_view import BlockView, open_blocks
from kvstore.client.client_core import ClientCore
from kvstore.client.client_record import ClientStatistics
from kvstore.client.disk_places import DISK_IDLE_S
from kvstore.client.driver import Driver
from kvstore.client.held_hit import HeldHit
from kvstore.client.lease_keeper import LeaseKeeper
from kvstore.client.locations import Hit
from kvstore.client.master_map import MasterMap
from kvstore.client.pieces import Pieces, integers
from kvstore.client.post_box import PostBoxes
from kvstore.client.put_options import PutOptions
from kvstore.client.reserved_places import ReservedPlaces
from kvstore.client.segment_keys import SegmentKeys
from kvstore.client.tenant import Tenant
from kvstore.copying import sharing_copies
from kvstore.discovery.directory import MasterDirectory, StaticMasters, as_directory
from kvstore.errors import InvalidValue
from kvstore.timeouts import check_timeout
from kvstore.values.quick_reads import QuickReads
from kvstore.values.quick_writes import QuickWrites
from kvstore.values.viewing import Viewing
from kvstore.wire import messages as m
from kvstore.wire.messages import Pin, PutOutcome
from kvstore.wire.peer_messages import TO_CLIENT, decode_to_client
from transfer import TransferError

if TYPE_CHECKING:
    from configs.schema import KVStoreConfig
    from kvstore.events.chains import Link
    from kvstore.node.store_node import StoreNode
    from transfer import Region, TransferEngine

logger = logging.getLogger(__name__)

HOLD_S_MAX: Final = 600.0
NOBODY: Final = Tenant()

Offsets = Sequence[int] | npt.NDArray[np.int64]


class StoreClient:
    """A process's access to the pool. All methods are thread-safe and have deadlines.

    The owner of the engine has it hear notes: `engine.on_notify(client.on_notify)`, before it opens
    the engine.

    Args:
        engine: The process's engine, open while the client is used.
        masters: The address of the only master, those of several, or a directory of them.
        config: The store's knobs.
        secret: The cluster secret.
        local_node: The store node on the same engine, if there is one.
        tenant: For whom the client acts.
    """

    def __init__(
        self,
        engine: TransferEngine,
        masters: str | Sequence[str] | MasterDirectory,
        config: KVStoreConfig,
        *,
        secret: bytes,
        local_node: StoreNode | None = None,
        tenant: Tenant = NOBODY,
    ) -> None:
        self._name = engine.name
        self._directory = as_directory(masters)
        self._link = MasterMap(
            self._directory, config, secret=secret, identity=f"{engine.name}.client"
        )
        self.segments = SegmentKeys(engine, local_node)
        self.posts = PostBoxes(self._link.borrow)
        self._disk_places = self._new_places(DISK_IDLE_S)
        ahead = self._disk_places if self._link.num_shards == 1 else None
        self.core = ClientCore(
            engine, self.segments, tenant=tenant, timeout_s=config.request_timeout_s,
            posts=self.posts, disk_places=ahead,
        )  # fmt: skip
        self.segments.on_leader(self._link.meet)
        self.driver = Driver(self._link, self.segments)
        self.leases = LeaseKeeper(
            renew=lambda ids, timeout_s: self._link.ask(
                m.Renew(self._name, list(ids)), m.Renewed, timeout_s=timeout_s
            ),
            release=lambda ids: self._link.ask(m.Release(self._name, list(ids)), m.Done),
            on_lost=lambda number: self.core.record.count(lost_leases=number),
            view_bytes_max=config.view_bytes,
        )
        self.places = self._new_places()
        for places in (self.places, self._disk_places):
            self.core.under_way.on_question(places.let_go)
        self._stack = ExitStack()
        self._stack.enter_context(sharing_copies(config.share_copies))

    def _new_places(self, idle_s: float | None = None) -> ReservedPlaces:
        return ReservedPlaces(
            lambda request, timeout_s: self._link.ask(request, m.Reserved, timeout_s=timeout_s),
            self._name,
            idle_s=idle_s,
        )

    def quick_reads(self) -> QuickReads:
        """Return the short way of single gets, with its own hot places."""
        return QuickReads(self.core, self.driver, self.segments, self.leases)

    def quick_writes(self) -> QuickWrites:
        """Return the short way of single puts."""
        return QuickWrites(self.core, self._link, self.segments, self.places, self.posts)

    def close(self) -> None:
        """Stop using the store. Held leases are released, others end by themselves."""
        self.posts.close()
        self.places.close()
        self._disk_places.close()
        self.leases.close()
        self._link.close()
        self.core.staging.close()
        self.segments.close()
        self._stack.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def use_master(self, address: str) -> None:
        """Ask another master from now on, where there is one at a known address."""
        assert isinstance(self._directory, StaticMasters), self._directory
        self._directory.move([address])

    def enter(self) -> m.Entered:
        """Tell the master for whom this client acts; else that happens when it wants to know.

        Raises:
            TenantRefused: The tenant is unknown, or its token is another one.
        """
        return self.driver.run(self.core.master.enter())

    def on_notify(self, peer: str, payload: bytes) -> bool:
        """Take a note if it is for a store client; short enough for the engine's thread.

        Returns:
            True if the note was for us.
        """
        if not payload.startswith(TO_CLIENT):
            return False
        try:
            self.segments.receive(peer, decode_to_client(payload))
        except (msgspec.MsgspecError, TransferError) as error:
            logger.warning("malformed note from %s: %s", peer, error)
        return True

    # -- reading ------------------------------------------------------------------------------

    def lookup_prefix(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Hit:
        """Find the longest leading run of `keys` that is in the pool, and lease it.

        The caller releases the hit when it has read what it wants; else the lease runs out.

        Raises:
            MasterUnavailable: No answer in time (retryable); treat it as a miss.
            Fenced: This incarnation is out of the cluster.
            TenantRefused: See `enter`.
        """
        return self.driver.run(self.core.lookup(keys, every=False, timeout_s=timeout_s))

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Hit:
        """Find all of `keys` that are in the pool, and lease them; `Hit.positions` says which.

        Raises as `lookup_prefix`.
        """
        return self.driver.run(self.core.lookup(keys, every=True, timeout_s=timeout_s))

    def hold(self, hit: Hit, *, max_s: float = HOLD_S_MAX) -> HeldHit:
        """Keep a hit's blocks in place until the result is closed: its lease is renewed.

        Args:
            hit: From a lookup; not to be released otherwise.
            max_s: After this it is not renewed any more, even if nobody has closed it.

        Raises:
            TooManyHolds: Something does not close what it holds.
        """
        return HeldHit(hit, self.leases, max_s=max_s)

    def view(
        self, hit: Hit, *, max_s: float = HOLD_S_MAX, timeout_s: float | None = None
    ) -> Viewing[BlockView]:
        """Read the blocks of a hit where they lie, for a `with` block; see `BlockView`.

        The hit is not to be released otherwise. Raises as `Store.view`, and LeaseExpired; blocks
        that are bad or out of reach are no error.
        """
        check_timeout(timeout_s)
        check_timeout(max_s, "max_s")
        steps = open_blocks(self.core, self.segments, self.leases, hit, max_s, timeout_s)
        return Viewing(lambda: self.driver.run(steps))

    def get_into(
        self, hit: Hit, region: Region, offsets: Offsets, *, timeout_s: float | None = None
    ) -> int:
        """Copy the blocks of a hit, block i to `offsets[i]` of the region.

        Every block's checksum is verified after the copy. Blocks that are bad or out of reach are
        reported to the master and copied from elsewhere; what follows the first for which that
        is not possible is of no use in a chain.

        Args:
            hit: From `lookup_prefix`, its lease still running.
            region: Target.
            offsets: [num_blocks] byte offsets; block i needs `hit.lengths[i]` bytes there.
            timeout_s: Default: the configured one.

        Returns:
            How many leading blocks are there, whole and verified.

        Raises:
            LeaseExpired: The lease ended before the copy did (retryable: look up again).
            InvalidValue: The offsets do not fit the hit or the region.
        """
        pieces = Pieces.of_blocks(region, offsets, hit.lengths)
        return self.copy(hit, pieces, timeout_s=timeout_s).num_good

    def get_ranges(
        self,
        hit: Hit,
        region: Region,
        offsets: Offsets,
        *,
        start: int,
        nbytes: int,
        timeout_s: float | None = None,
    ) -> int:
        """Copy the bytes `[start, start + nbytes)` of every block, as of one layer of KV.

        Blocks that were put with `chunk_bytes` move little more than the range; others are read
        whole, since only so can they be verified. Otherwise as `get_into`.
        """
        lengths = np.full(hit.num_blocks, nbytes, dtype=np.int64)
        whole = Pieces.of_blocks(region, offsets, lengths)
        pieces = whole.starting_at(np.full(hit.num_blocks, start, dtype=np.int64))
        return self.copy(hit, pieces, timeout_s=timeout_s).num_good

    def copy(self, hit: Hit, pieces: Pieces, *, timeout_s: float | None = None) -> Copied:
        """Copy any pieces of the blocks of a hit, and say which blocks are good. See `get_into`."""
        return self.driver.run(self.core.copy(hit, pieces, timeout_s))

    def release(self, hit: Hit, *, wait: bool = True) -> None:
        """End the lease of a hit. An unreachable master is no error: the lease runs out.

        Args:
            hit: From a lookup.
            wait: Until the master has answered; else it is told a moment later, of several at once.
        """
        if not wait:
            self.leases.drop(hit.lease)
        elif hit.lease_id:
            self.driver.run(self.core.reading.release([hit.lease_id]))

    def exists(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bool]:
        """Tell which blocks are in the pool now. Raises as `lookup_prefix`."""
        return self.driver.run(self.core.exists(keys, timeout_s))

    # -- writing ------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[bytes],
        region: Region,
        offsets: Offsets,
        nbytes_each: int | Sequence[int] | npt.NDArray[np.int64],
        *,
        pin: bool = False,
        options: PutOptions | None = None,
        timeout_s: float | None = None,
    ) -> tuple[PutOutcome, ...]:
        """Store blocks, each whole or not at all, on other nodes than this one if there are any.

        A block that is there already is not sent again (`EXISTS`, and it is pinned if asked for);
        other bytes under an existing key are not stored (`CONFLICT`, the first stay). A key that
        is being written, by anybody or earlier in this very batch, is `IN_PROGRESS`. The
        source bytes must not change until the call returns.

        Args:
            keys: 16 bytes each.
            region: Source.
            offsets: [N] byte offsets in the region.
            nbytes_each: Bytes of every block, or [N] bytes of each.
            pin: Never evict these blocks; short for `PutOptions(pin=Pin.HARD)`.
            options: How to store them.
            timeout_s: For the whole call; default: the configured one.

        Returns:
            What became of each block, in order; never `GRANTED`.

        Raises:
            MasterUnavailable: It did not answer (retryable). What it granted is given back.
            Fenced: This incarnation is out of the cluster.
            TenantRefused: See `enter`.
            InvalidKey, InvalidValue: Not 16 bytes, columns of different lengths, or pieces
                outside of the region.
        """
        if options is None:
            options = PutOptions(pin=Pin.HARD if pin else Pin.NONE)
        elif pin:
            raise InvalidValue(problem="pin and options exclude one another")
        lengths = np.broadcast_to(integers(nbytes_each), (len(keys),))
        pieces = Pieces.of_blocks(region, offsets, lengths)
        return self.put_pieces(keys, pieces, options, timeout_s=timeout_s)

    def describe(
        self, keys: Sequence[bytes], links: Sequence[Link], *, timeout_s: float | None = None
    ) -> None:
        """Say what blocks are that are put next; `PutOptions.chain` says it of one chain.

        A master that is away, or without subscribers of events, is no error.
        """
        self.driver.run(self.core.describe(keys, links, self.core.deadline(timeout_s)))

    def put_pieces(
        self,
        keys: Sequence[bytes],
        pieces: Pieces,
        options: PutOptions,
        *,
        timeout_s: float | None = None,
    ) -> tuple[PutOutcome, ...]:
        """Store blocks whose bytes are gathered from several pieces of memory. See `put`."""
        self.posts.generation()  # a box is opened here, where it may be waited for
        return self.driver.run(self.core.put(keys, pieces, options, timeout_s))

    def set_pin(
        self,
        keys: Sequence[bytes],
        pin: Pin,
        *,
        pin_s: float = 0.0,
        group: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """Pin blocks that are there, or let them go (`Pin.NONE`), by key and by group.

        Returns:
            How many were found. Raises as `lookup_prefix`.
        """
        names = self.core.names(keys)
        return self.driver.run(
            self.core.writing.set_pin(names, pin, pin_s=pin_s, group=group, timeout_s=timeout_s)
        )

    def remove(
        self, keys: Sequence[bytes], *, group: str = "", timeout_s: float | None = None
    ) -> int:
        """Forget blocks, pinned ones too, by key and by group; return how many were there.

        Who holds a lease on them can read them until it ends. Raises as `lookup_prefix`.
        """
        names = self.core.names(keys)
        return self.driver.run(self.core.writing.remove(names, group=group, timeout_s=timeout_s))

    # -- the cluster --------------------------------------------------------------------------

    def fence(self, incarnations: Sequence[str]) -> None:
        """Tell the master who is not in the view any more: they may still run, and write."""
        self._link.ask(m.Fence(list(incarnations), dead=False), m.Done)

    def confirm_dead(self, incarnations: Sequence[str]) -> None:
        """Tell the master who certainly runs no more: what they were writing can be reused."""
        self._link.ask(m.Fence(list(incarnations), dead=True), m.Done)

    def master_statistics(self) -> m.MasterStatistics:
        """Return the pool's figures. Raises as `lookup_prefix`."""
        return self._link.ask(m.Observe(), m.MasterStatistics)

    def statistics(self) -> ClientStatistics:
        """Return this client's counts."""
        return self.core.record.statistics()
