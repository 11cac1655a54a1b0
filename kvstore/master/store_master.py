"""The store master as a state machine: `step(request, now) -> reply`. Pure, single-threaded.

It knows where every block is and who may touch which bytes; it never sees a block's bytes. Time
comes in with each request, and what time brings (leases end, silent nodes are dropped, slow puts
lose their place) happens before the request is looked at.

What it keeps, checked by `check_invariants`:

- Every byte of every segment is free, or in one copy of one state
  (`kvstore/master/books/copy_state.py`).
- A committed block's bytes do not change or move while a lease on them runs.
- Bytes that some writer may still write are given to nobody else.
- A node's end takes its own copies and nothing more.
- A master that did not run for a while accuses nobody of silence, and ends no lease for it.
- A tenant is charged for exactly the bytes that are its own.

Soft state: what is lost with a master comes back from the nodes when they register with the next.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from configs.kvstore_policies import PolicyConfig
from configs.schema import Eviction
from kvstore.events.event_log import EventBatch, EventLog
from kvstore.key_index import PlainKeyIndex
from kvstore.master.abandoned import AbandonedBatches
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.tenants import TenantRule
from kvstore.master.copies.planning import Planning
from kvstore.master.describing import Describing
from kvstore.master.figures import check_invariants, statistics
from kvstore.master.inventory import Inventory
from kvstore.master.keeping import Keeping
from kvstore.master.lending import Lending
from kvstore.master.opening import PlaceOpener
from kvstore.master.posted_ends import take_end
from kvstore.master.reading import Reading
from kvstore.master.settling import Settling
from kvstore.master.storing import Post, Storing, Wish
from kvstore.master.tenancy import Tenancy
from kvstore.master.timing import MasterTiming as MasterTiming
from kvstore.master.transition import MasterPart, Transition, malformed
from kvstore.master.witnessed import Witnessed
from kvstore.master.writing import Writing
from kvstore.wire import messages as m
from kvstore.wire.granted import Granted

if TYPE_CHECKING:
    from kvstore._rows import PostOffice

FENCED_MAX: Final = 1 << 14  # fenced incarnations kept in mind
DEAF_SHARE: Final = 1 / 2  # of the silence that ends a node: a pause in which it may have spoken
ROUNDING_S: Final = 1e-6  # sums of durations are not exact
ASLEEP_SHARE: Final = 1 / 3  # of a lease: a pause in which its client may have failed to renew it


class StoreMaster:
    """Decides over the metadata of one pool. Not thread-safe.

    Args:
        timing: Its durations.
        events: Where it notes what subscribers are told; None if there are none.
        eviction: Which blocks make room for others.
        tenants: Who may use how much; none: everybody is "", without a limit.
        policies: What it does by itself; default: as configured by default.
        last_copy_id: Copies that it orders get higher numbers. Above all of an earlier master, so
            that what nodes report of those means nothing here.
        last_lease_id: Likewise of leases: no client renews here what it had from another.
    """

    def __init__(
        self,
        timing: MasterTiming,
        *,
        events: EventLog | None = None,
        eviction: Eviction = Eviction.LRU,
        tenants: Sequence[TenantRule] = (),
        policies: PolicyConfig | None = None,
        last_copy_id: int = 0,
        last_lease_id: int = 0,
    ) -> None:
        self._timing = timing
        self._events = events
        self._catalog = Catalog(
            lease_s=timing.lease_s,
            soft_pin_s=timing.soft_pin_s,
            eviction=eviction,
            events=events,
            tenants=tenants,
        )
        self._fenced: OrderedDict[str, None] = OrderedDict()
        self._stepped_at = -math.inf
        self._due_s = -math.inf  # nothing is due before, but for soft pins, which tell themselves
        self._soft_pins = self._catalog.pins.soft
        # What a request starts ends no sooner; nor does a shorter pause excuse anybody.
        self._soonest_s = min(timing.lease_s, timing.silence_s, timing.put_s)
        # An idle master is not asleep: else short leases would never end while nobody asks.
        self._asleep_s = max(timing.lease_s * ASLEEP_SHARE, 2 * timing.heartbeat_s)
        self._pause_s_max = min(timing.silence_s * DEAF_SHARE, self._asleep_s)
        self._catalog.planned.last_id = self._catalog.pins.untold.seed = last_copy_id
        self._catalog.leases.last_id = last_lease_id
        self._planning = Planning(self._catalog, policies or PolicyConfig())
        abandoned = AbandonedBatches(self._catalog)
        opener = PlaceOpener(self._catalog, timing, abandoned)
        self._settling = Settling(self._catalog)
        self._parts: list[MasterPart] = [
            Reading(self._catalog),
            writing := Writing(self._catalog, timing, abandoned, opener),
            storing := Storing(self._catalog, timing, abandoned, opener),
            lending := Lending(self._catalog, timing),
            self._settling,
            Witnessed(self._catalog, abandoned, put_s=timing.put_s),
            Keeping(self._catalog, timing),
            Describing(events),
            Tenancy(self._catalog),
            Inventory(self._catalog),
            self._planning,
        ]
        self._writing, self._storing, self._lending = writing, storing, lending
        self._transitions: dict[type, Transition] = {
            m.Fence: self._fence,
            m.Observe: self._observe,
        }
        for part in self._parts:
            self._transitions.update(part.transitions())

    def step(self, request: m.Request, now: float) -> m.Reply:
        """Carry out one request.

        Args:
            request: What is asked; a request that is not legal changes nothing.
            now: Seconds on any clock that does not go backwards.
        """
        pause_s = now - self._stepped_at
        assert pause_s >= 0, (now, self._stepped_at)
        self._stepped_at = now
        if pause_s > self._pause_s_max or now >= self._due_s or now >= self._soft_pins.first_end_s:
            self._advance(now, pause_s)
        if self._storing.has_wishes:
            self._storing.grant_wishes(now)
        if self._fenced and not isinstance(request, m.Drain):
            sender = getattr(request, "client", None) or getattr(request, "node", None)
            if sender in self._fenced:
                return m.Refused(m.RefusalReason.FENCED, f"incarnation {sender} is fenced")
        transition = self._transitions.get(type(request))
        if transition is None:
            return malformed(f"{type(request).__name__} is not known here")
        return transition(request, now)

    @property
    def has_wishes(self) -> bool:
        """Whether `grant_wishes` has something to do."""
        return self._storing.has_wishes

    def grant_wishes(self, now: float) -> None:
        """Do what need not be done before the reply to the last request; else the next step does.

        Args:
            now: As of `step`.
        """
        self._storing.grant_wishes(now)

    # -- posted puts: see `kvstore/master/posts.py` -------------------------------------------

    @property
    def num_keys(self) -> int:
        """How many keys are taken."""
        return len(self._catalog.index.rows) + len(self._catalog.puts.writers)

    def mirror_keys(self, office: PostOffice | None) -> None:
        """Keep a word there for each key that is taken; None: nowhere. O(keys)."""
        for keys in (self._catalog.index.rows, self._catalog.puts.writers):
            assert not isinstance(keys, PlainKeyIndex), "nothing is compiled"
            keys.mirror(office)

    def takes_places(self, now: float) -> bool:
        """Whether `step` may, at this time, take a place from a client that knows of no end."""
        return self._writing.is_late(now) or self._lending.is_silent(now)

    def take_posts(self, posts: Sequence[Post]) -> None:
        """Make blocks of what clients have posted, in this order."""
        self._storing.take_posts(posts)

    def take_end(self, client: str, batch: int, checksums: bytes, count: int) -> None:
        """Make blocks of all of a batch, whose client has posted that they are written."""
        take_end(self._catalog, client, batch, checksums, count, self._stepped_at)

    def take_order(self, client: str, first: int, count: int, length: int, poster: int) -> None:
        """Note which places a client wishes for: numbers from `first` on."""
        if client not in self._fenced:
            self._storing.take_order(client, first, count, length, poster)

    def take_grants(self) -> list[tuple[Wish, Granted]]:
        """Return what is to be told to posters: what each ordered, and what it got."""
        granted, self._storing.granted = self._storing.granted, []
        return granted

    def take_events(self) -> list[EventBatch]:
        """Return what steps since the last call have to tell, in order; the caller sends it."""
        return [] if self._events is None else self._events.take()

    def restate_events(self) -> None:
        """Tell the whole index with the next `take_events`. O(blocks)."""
        if self._events is not None:
            self._events.restate(self._catalog.notices.present(self._catalog.index))

    def statistics(self) -> m.MasterStatistics:
        """Return the figures of the pool as of the last step."""
        return statistics(self._catalog)

    def settled_s(self) -> float:
        """Return until when places of some segment may be written by an earlier master's leave."""
        return self._settling.settled_s()

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless everything that the module promises holds."""
        check_invariants(self._catalog)
        self._planning.check_invariants()

    def _advance(self, now: float, pause_s: float) -> None:
        if pause_s < math.inf:
            self._excuse(pause_s, now)
        next_s = min(part.advance(now) for part in self._parts)
        self._due_s = min(next_s, now + self._soonest_s) - ROUNDING_S

    def _excuse(self, pause_s: float, now: float) -> None:
        """Nobody could be heard while we did not run (or nothing was said at all)."""
        if pause_s > self._timing.silence_s * DEAF_SHARE:
            self._catalog.pool.pardon(now)
        if pause_s > self._asleep_s:
            self._catalog.leases.excuse(pause_s)

    def _fence(self, request: m.Fence, now: float) -> m.Reply:
        catalog = self._catalog
        changed = 0
        for incarnation in request.incarnations:
            self._fenced[incarnation] = None
            self._fenced.move_to_end(incarnation)
            catalog.drop_node(incarnation)
            catalog.end_leases(catalog.leases.drop_client(incarnation))
            catalog.tenants.forget(incarnation)
            for batch in catalog.puts.of_client(incarnation):
                changed += catalog.end_batch(batch, at_rest=request.dead)
        while len(self._fenced) > FENCED_MAX:
            self._fenced.popitem(last=False)
        if request.dead:
            self._settling.confirm_dead(request.incarnations, now)
        return m.Done(changed)

    def _observe(self, request: m.Observe, now: float) -> m.Reply:
        del request, now
        return self.statistics()
