"""The store master as a state machine: `step(request, now) -> reply`. Pure, single-threaded.

It knows where every block is and who may touch which bytes; it never sees a block's bytes. Time
comes in with each request, and what time brings (leases end, silent nodes are dropped, slow puts
lose their place) happens before the request is looked at.

What it keeps, checked by `check_invariants`:

- Every byte of every segment is free, or in one extent of one state (`kvstore/master/block.py`).
- A committed block's bytes do not change or move while a lease on them runs.
- Bytes that some writer may still write are given to nobody else.
- A node's end takes its own copies and nothing more.
- A master that did not run for a while accuses nobody of silence.

Soft state: what is lost with a master comes back from the nodes when they register with the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from configs.schema import Eviction
from kvstore.events.event_log import EventBatch, EventLog
from kvstore.eviction import new_policy
from kvstore.master.block import Extent
from kvstore.master.catalog import Catalog
from kvstore.master.open_puts import OpenPut, PutId
from kvstore.master.pool import Candidates
from kvstore.master.segment import Segment
from kvstore.wire import messages as m

REMEMBERED_MAX: Final = 1 << 14  # fenced incarnations and abandoned batches kept in mind
NameT = TypeVar("NameT", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterTiming:
    """The master's durations, in seconds.

    Attributes:
        lease_s: How long bytes found by a lookup stay in place.
        silence_s: A node silent for this long is dropped until it registers again.
        put_s: A put may take this long from allocation to commit. Also how long a segment that
            writers knew before (under another master) is not allocated from.
    """

    lease_s: float = 10.0
    silence_s: float = 10.0
    put_s: float = 30.0


class StoreMaster:
    """Decides over the metadata of one pool. Not thread-safe.

    Args:
        timing: Its durations.
        events: Where it notes what subscribers are told; None if there are none.
        eviction: Which blocks make room for others.
    """

    def __init__(
        self,
        timing: MasterTiming,
        *,
        events: EventLog | None = None,
        eviction: Eviction = Eviction.LRU,
    ) -> None:
        self._timing = timing
        self._events = events
        self._eviction = eviction
        self._catalog = Catalog(lease_s=timing.lease_s, events=events)
        self._fenced: OrderedDict[str, None] = OrderedDict()
        self._abandoned: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._stepped_at: float | None = None
        self._transitions: dict[type, Callable[[Any, float], m.Reply]] = {
            m.Register: self._register,
            m.Heartbeat: self._heartbeat,
            m.Leave: self._leave,
            m.Lookup: self._lookup,
            m.Release: self._release,
            m.Allocate: self._allocate,
            m.Finish: self._finish,
            m.Exists: self._exists,
            m.Remove: self._remove,
            m.ReportBad: self._report_bad,
            m.Fence: self._fence,
            m.Observe: self._observe,
        }

    def step(self, request: m.Request, now: float) -> m.Reply:
        """Carry out one request.

        Args:
            request: What is asked; a request that is not legal changes nothing.
            now: Seconds on any clock that does not go backwards.
        """
        self._advance(now)
        sender = getattr(request, "client", None) or getattr(request, "node", None)
        if sender in self._fenced:
            return m.Refused(m.RefusalReason.FENCED, f"incarnation {sender} is fenced")
        transition = self._transitions.get(type(request))
        if transition is None:
            return _malformed(f"{type(request).__name__} is not known here")
        return transition(request, now)

    def take_events(self) -> list[EventBatch]:
        """Return what steps since the last call have to tell, in order; the caller sends it."""
        return [] if self._events is None else self._events.take()

    def restate_events(self) -> None:
        """Tell the whole index with the next `take_events`. O(blocks)."""
        if self._events is not None:
            self._events.restate(self._catalog.present())

    def statistics(self) -> m.MasterStatistics:
        """Return the figures of the pool as of the last step."""
        return self._catalog.statistics()

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless everything that the module promises holds."""
        self._catalog.check_invariants()

    # -- time ---------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        assert self._stepped_at is None or now >= self._stepped_at, (now, self._stepped_at)
        previous, self._stepped_at = self._stepped_at, now
        pool, puts = self._catalog.pool, self._catalog.puts
        if previous is not None and now - previous > self._timing.silence_s / 2:
            # Nobody could be heard while we did not run (or nothing was said at all).
            pool.pardon(now)
        self._catalog.expire_leases(now)
        for put_id in puts.opened_before(now - self._timing.put_s):
            puts.quarantine(put_id)
        for node in pool.silent_since(now - self._timing.silence_s):
            self._catalog.drop_node(node)

    # -- nodes --------------------------------------------------------------------------------

    def _register(self, request: m.Register, now: float) -> m.Reply:
        held = request.held
        columns = (held.keys, held.offsets, held.lengths, held.checksums, held.pinned)
        if not _equally_long(*columns):
            return _malformed("columns of different lengths")
        known = self._catalog.pool.get(request.node)
        if known is not None:  # the reply to the first was lost: what it holds is known already
            known.heard_s = now
            return m.Registered(adopted=0)
        segment = Segment(
            request.node,
            address=request.address,
            capacity=request.capacity,
            now=now,
            # Somebody may have been writing here when the last master went. It had to finish
            # within `put_s`; a stopped process may not have, and then the checksum tells.
            placeable_s=now if request.untouched else now + self._timing.put_s,
            policy=new_policy(self._eviction),
        )
        self._catalog.pool.add(segment)
        adopted = 0
        for offset, key, nbytes, checksum, pinned in sorted(
            zip(held.offsets, held.keys, held.lengths, held.checksums, held.pinned, strict=True)
        ):
            if self._catalog.adopt(segment, key, offset, nbytes, checksum):
                adopted += 1
                if pinned:
                    self._catalog.pin(key)
        return m.Registered(adopted=adopted)

    def _heartbeat(self, request: m.Heartbeat, now: float) -> m.Reply:
        segment = self._catalog.pool.get(request.node)
        if segment is not None:
            segment.heard_s = now
        return m.Known(known=segment is not None)

    def _leave(self, request: m.Leave, now: float) -> m.Reply:
        del now
        known = self._catalog.pool.get(request.node) is not None
        self._catalog.drop_node(request.node)
        return m.Done(int(known))

    def _fence(self, request: m.Fence, now: float) -> m.Reply:
        del now
        changed = 0
        for incarnation in request.incarnations:
            _remember(self._fenced, incarnation)
            self._catalog.drop_node(incarnation)
            self._catalog.end_leases_of(incarnation)
            for put_id in self._catalog.puts.of_client(incarnation):
                changed += 1
                if request.dead:
                    self._catalog.settle(put_id)
                else:
                    self._catalog.puts.quarantine(put_id)
        return m.Done(changed)

    # -- reading ------------------------------------------------------------------------------

    def _lookup(self, request: m.Lookup, now: float) -> m.Reply:
        extents = self._catalog.leading_run(
            request.keys, reader=request.client, avoid=frozenset(request.avoid)
        )
        lease_id = self._catalog.lease(request.client, extents, now) if extents else 0
        nodes, node_idx = self._catalog.name_nodes(extents)
        return m.Located(
            lease_id=lease_id,
            lease_s=self._timing.lease_s,
            nodes=nodes,
            node_idx=node_idx,
            offsets=[extent.offset for extent in extents],
            lengths=[extent.nbytes for extent in extents],
            checksums=[self._checksum(extent.key) for extent in extents],
        )

    def _release(self, request: m.Release, now: float) -> m.Reply:
        del now
        return m.Done(sum(self._catalog.end_lease(request.client, i) for i in request.lease_ids))

    def _exists(self, request: m.Exists, now: float) -> m.Reply:
        del now
        return m.Present([self._catalog.find(key) is not None for key in request.keys])

    def _observe(self, request: m.Observe, now: float) -> m.Reply:
        del request, now
        return self.statistics()

    # -- writing ------------------------------------------------------------------------------

    def _allocate(self, request: m.Allocate, now: float) -> m.Reply:
        if not _equally_long(request.keys, request.lengths, request.checksums):
            return _malformed("columns of different lengths")
        for batch in request.abandoned:
            self._abandon(request.client, batch)
        if (request.client, request.batch) in self._abandoned:
            return _malformed(f"batch {request.batch} was abandoned")
        candidates = self._catalog.pool.candidates(request.client, request.avoid, now)
        outcomes: list[m.PutOutcome] = []
        extents: list[Extent | None] = []
        for index in range(len(request.keys)):
            outcome, extent = self._grant(request, index, candidates, now)
            outcomes.append(outcome)
            extents.append(extent)
        nodes, granted_idx = self._catalog.name_nodes([e for e in extents if e is not None])
        remaining = iter(granted_idx)
        return m.Allocated(
            outcomes=outcomes,
            nodes=nodes,
            node_idx=[-1 if extent is None else next(remaining) for extent in extents],
            offsets=[-1 if extent is None else extent.offset for extent in extents],
            put_s=self._timing.put_s,
        )

    def _grant(
        self, request: m.Allocate, index: int, candidates: Candidates, now: float
    ) -> tuple[m.PutOutcome, Extent | None]:
        key, nbytes = request.keys[index], request.lengths[index]
        block = self._catalog.find(key)
        if block is not None:
            if (block.nbytes, block.checksum) != (nbytes, request.checksums[index]):
                return m.PutOutcome.CONFLICT, None
            if request.pin is m.Pin.HARD:
                self._catalog.pin(key)
            return m.PutOutcome.EXISTS, None
        put_id = PutId(request.client, request.batch, index)
        mine = self._catalog.puts.find(put_id)
        if mine is not None and mine.extent.key == key:
            return m.PutOutcome.GRANTED, mine.extent  # asked again: the first reply was lost
        if self._catalog.puts.holds(key):
            return m.PutOutcome.IN_PROGRESS, None
        extent = self._catalog.pool.place(key, nbytes, candidates)
        if extent is None:
            return m.PutOutcome.NO_SPACE, None
        self._catalog.puts.add(
            OpenPut(
                put_id=put_id,
                extent=extent,
                checksum=request.checksums[index],
                pinned=request.pin is m.Pin.HARD,
                opened_s=now,
            )
        )
        return m.PutOutcome.GRANTED, extent

    def _finish(self, request: m.Finish, now: float) -> m.Reply:
        del now

        def puts(indices: list[int]) -> list[PutId]:
            return [PutId(request.client, request.batch, index) for index in indices]

        # From the last to the first, so that the root of a chain is the youngest.
        stored = [self._catalog.commit(put_id) for put_id in reversed(puts(request.committed))]
        for put_id in puts(request.aborted):
            self._catalog.settle(put_id)
        for put_id in puts(request.unsettled):
            self._catalog.puts.quarantine(put_id)
        return m.Finished(stored=stored[::-1])

    def _abandon(self, client: str, batch: int) -> None:
        _remember(self._abandoned, (client, batch))  # its request may still be on the way
        for put_id in self._catalog.puts.of_batch(client, batch):
            self._catalog.settle(put_id)

    # -- removal ------------------------------------------------------------------------------

    def _remove(self, request: m.Remove, now: float) -> m.Reply:
        del now
        found = {key: self._catalog.find(key) for key in request.keys}
        blocks = [block for block in found.values() if block is not None]
        for block in blocks:
            for extent in tuple(block.replicas.values()):
                self._catalog.drop(extent)
        return m.Done(len(blocks))

    def _report_bad(self, request: m.ReportBad, now: float) -> m.Reply:
        columns = (request.keys, request.nodes, request.offsets, request.corrupt)
        if not _equally_long(*columns):
            return _malformed("columns of different lengths")
        dropped = 0
        for key, node, offset, corrupt in zip(*columns, strict=True):
            block = self._catalog.find(key)
            extent = None if block is None else block.replicas.get(node)
            if extent is None or extent.offset != offset:
                continue  # gone or replaced since the reporter looked it up
            self._catalog.counts["corrupt" if corrupt else "unreachable"] += 1
            # One client's broken link is not the end of a node that others can reach.
            silence_s = now - self._catalog.pool.of(extent).heard_s
            if corrupt or silence_s > self._timing.silence_s / 3:
                self._catalog.drop(extent)
                dropped += 1
        return m.Done(dropped)

    def _checksum(self, key: bytes) -> int:
        block = self._catalog.find(key)
        assert block is not None, key
        return block.checksum


def _equally_long(*columns: Sequence[object]) -> bool:
    return len({len(column) for column in columns}) == 1


def _malformed(problem: str) -> m.Refused:
    return m.Refused(m.RefusalReason.MALFORMED, problem)


def _remember(memory: OrderedDict[NameT, None], name: NameT) -> None:
    memory[name] = None
    memory.move_to_end(name)
    while len(memory) > REMEMBERED_MAX:
        memory.popitem(last=False)
