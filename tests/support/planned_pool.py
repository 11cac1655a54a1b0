"""A master and its nodes without processes: bytes are remembered by place, time is a number.

After each step, or every few, the books are checked, and each committed copy must hold its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.kvstore_policies import PolicyConfig
from kvstore.events.event_log import EventFold, EventLog, Medium, Stored
from kvstore.master.books.copy_state import COMMITTED, RETIRED
from kvstore.master.books.tenants import TenantRule
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.wire import messages as m

LENGTH = 4096


class PlannedPool:
    """Drives one `StoreMaster` by requests; nodes make the copies that they are told to."""

    def __init__(
        self,
        policies: PolicyConfig | None = None,
        *,
        check_every: int = 1,
        last_copy_id: int = 0,
        tenants: Sequence[TenantRule] = (),
        **timing: float,
    ) -> None:
        self.check_every = check_every
        self.steps = 0
        self.timing = MasterTiming(**{"silence_s": 1e6, "put_s": 60.0, **timing})
        self.events = EventLog(first_sequence=1)
        self.told = EventFold()  # what a subscriber knows
        self.master = StoreMaster(
            self.timing,
            policies=policies,
            last_copy_id=last_copy_id,
            events=self.events,
            tenants=tenants,
        )
        self.catalog = self.master._catalog
        self.now = 100.0
        self.bytes: dict[tuple[str, int, int], bytes] = {}  # (node, segment, offset) -> key
        self.batches = 0
        self.handed: dict[str, dict[int, m.Copy]] = {}  # copies that a node was told to make

    def step(self, request, *, later: float = 0.001):
        self.now += later
        reply = self.master.step(request, self.now)
        self.steps += 1
        if self.steps % self.check_every == 0:
            self.check()
        return reply

    def check(self) -> None:
        self.master.check_invariants()
        for batch in self.master.take_events():
            self.told.apply(batch.changes)
        assert self.told_media() == set(self.catalog.notices.present(self.catalog.index)), (
            "subscribers know something else"
        )
        table, pool = self.catalog.table, self.catalog.pool
        for row in table.rows():
            if table.state[row] in (COMMITTED, RETIRED):
                where = pool.of(row).where
                held = self.bytes.get((where.node, where.segment, table.offset[row]))
                assert held == table.keys[row], "a committed copy has other bytes"

    def told_media(self) -> set[tuple[bytes, Medium]]:
        """(key, medium) of all blocks, as a subscriber knows them."""
        stored = [change for change in self.told.changes() if isinstance(change, Stored)]
        return {(key, change.medium) for change in stored for key in change.keys}

    # -- nodes --------------------------------------------------------------------------------

    def join(
        self, node: str, blocks: int, *, medium=m.Medium.DRAM, segment=0, domain="", held=None
    ):
        self.step(
            m.Register(
                node=node,
                address="127.0.0.1:1",
                capacity=blocks * LENGTH,
                untouched=True,
                held=held or m.HeldBlocks(),
                segment=segment,
                medium=medium,
                domain=domain,
            )
        )

    def ask_work(self, node: str, *, limit: int = 1024, **report) -> list[m.Copy]:
        reply = self.step(m.NextCopies(node=node, limit=limit, **report))
        assert isinstance(reply, m.Copies), reply
        self.handed.setdefault(node, {}).update((copy.copy_id, copy) for copy in reply.copies)
        return reply.copies

    def make(self, node: str, copy: m.Copy) -> None:
        """Move the bytes of one copy, as the node would."""
        source = self.bytes[(node, copy.source_segment, copy.source_offset)]
        assert source == copy.key, "the source's bytes are not those of the block"
        target = copy.target
        self.bytes[(target.node, target.segment, copy.target_offset)] = copy.key

    def work(self, node: str, *, rounds: int = 100) -> int:
        """Let a node work until there is nothing more to do; return how many copies it made."""
        done: list[int] = []
        made = 0
        for _ in range(rounds):
            copies = self.ask_work(node, done=done)
            done = []
            for copy in copies:
                self.make(node, copy)
                done.append(copy.copy_id)
            made += len(done)
            if not copies:
                return made
        raise AssertionError("the work does not end")

    def settle(self, *, seconds: float = 5.0) -> int:
        """Let time pass and all nodes work; return how many copies were made."""
        made, end = 0, self.now + seconds
        while self.now < end:
            for node in [node.name for node in self.catalog.pool.nodes]:
                made += self.work(node)
            self.step(m.Observe(), later=0.1)
        return made

    # -- clients ------------------------------------------------------------------------------

    def put(self, keys, *, client="writer", replicas=1, media=(), pin=m.Pin.NONE, prefer=()):
        """Put blocks; return the outcomes."""
        self.batches += 1
        reply = self.step(
            m.Allocate(
                client=client,
                batch=self.batches,
                keys=list(keys),
                lengths=[LENGTH] * len(keys),
                checksums=[int.from_bytes(key[:8], "big") for key in keys],
                replicas=replicas,
                media=list(media),
                pin=pin,
                prefer=list(prefer),
            )
        )
        assert isinstance(reply, m.Allocated), reply
        rows = [row for row, node in enumerate(reply.node_idx) if node >= 0]
        for row in rows:
            where = reply.nodes[reply.node_idx[row]]
            place = (where.node, where.segment, reply.offsets[row])
            self.bytes[place] = keys[row // replicas]
        finished = self.step(m.Finish(client=client, batch=self.batches, committed=rows))
        assert all(finished.stored)
        return reply.outcomes

    def read(self, keys, *, client="reader", release: bool = True) -> m.Located:
        """Look up all of these; check that what is found has its bytes."""
        reply = self.step(m.Lookup(client=client, keys=list(keys), every=True))
        for position, node in enumerate(reply.node_idx):
            if node >= 0:
                where = reply.nodes[node]
                place = (where.node, where.segment, reply.offsets[position])
                assert self.bytes[place] == keys[position]
        if release and reply.lease_id:
            self.step(m.Release(client=client, lease_ids=[reply.lease_id]))
        return reply

    def there(self, keys) -> int:
        return sum(self.catalog.index.rows.get(key) is not None for key in keys)

    def places(self, key: bytes) -> list[tuple[str, str]]:
        """(node, medium) of each copy, sorted."""
        pool = self.catalog.pool
        return sorted(
            (pool.of(row).node.name, str(pool.of(row).medium)) for row in self.catalog.copies(key)
        )

    def on(self, node: str) -> int:
        """Count the copies on a node."""
        known = self.catalog.pool.node(node)
        return 0 if known is None else sum(s.blocks for s in known.segments.values())

    def used(self, node: str, segment: int = 0) -> float:
        found = self.catalog.pool.find(node, segment)
        return 1 - found.free / found.capacity
