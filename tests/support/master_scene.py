"""A master, its clock, and short ways to ask; its books are checked after each step."""

from __future__ import annotations

from configs.schema import Eviction
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.wire import messages as m

BLOCK = 64


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


class Scene:
    def __init__(self, *nodes, blocks=8, timing=None, eviction=Eviction.LRU, tenants=()) -> None:
        timing = timing or MasterTiming(lease_s=10.0, silence_s=9.0, put_s=30.0)
        self.master = StoreMaster(timing, eviction=eviction, tenants=tenants)
        self.catalog = self.master._catalog
        self.now, self.batch = 0.0, 0
        for node in nodes:
            self.register(node, blocks=blocks)

    def step(self, request: m.Request) -> m.Reply:
        """Send a request, by way of its bytes, and return the reply likewise."""
        reply = self.master.step(m.decode_request(m.encode(request)), self.now)
        self.master.check_invariants()
        return m.decode_reply(m.encode(reply))

    def refused(self, request: m.Request) -> m.RefusalReason:
        before = self.figures
        reply = self.step(request)
        assert isinstance(reply, m.Refused), reply
        assert self.figures == before, "a refused request changed something"
        return reply.reason

    def register(self, node, *, blocks=8, untouched=True, held=None, **more):
        held = held or m.HeldBlocks()
        address = f"{node}:1"
        return self.step(m.Register(node, address, blocks * BLOCK, untouched, held, **more))

    def pass_time(self, seconds: float, *speaking: str) -> None:
        """Let time pass in steps that the master is awake for."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.step(m.Observe())
            for node in speaking:
                self.step(m.Heartbeat(node))

    def allocate(self, client, *ids, length=BLOCK, checksum=7, **more) -> m.Allocated:
        self.batch += 1
        n = len(ids)
        columns = ([key(i) for i in ids], [length] * n, [checksum] * n)
        reply = self.step(m.Allocate(client, self.batch, *columns, **more))
        assert isinstance(reply, m.Allocated), reply
        return reply

    def finish(self, client, *, batch=None, committed=(), **columns):
        return self.step(m.Finish(client, batch or self.batch, list(committed), **columns))

    def put(self, client, *ids, **options) -> list[str]:
        """Store blocks; return the outcomes."""
        reply = self.allocate(client, *ids, **options)
        rows = [row for row, node in enumerate(reply.node_idx) if node >= 0]
        if rows:
            assert all(self.finish(client, committed=rows).stored)
        return [str(outcome) for outcome in reply.outcomes]

    def lookup(self, client, *ids, avoid=(), every=False) -> m.Located:
        return self.step(m.Lookup(client, [key(i) for i in ids], list(avoid), every))

    def there(self, *ids, client="") -> list[int]:
        flags = self.step(m.Exists([key(i) for i in ids], client)).flags
        return [i for i, flag in zip(ids, flags, strict=True) if flag]

    def places(self, *ids) -> list[set[tuple[str, int]]]:
        """Where the copies of each block are: nodes and numbers of segments."""
        wheres = [[self.catalog.pool.of(r).where for r in self.catalog.copies(key(i))] for i in ids]
        return [{(where.node, where.segment) for where in copies} for copies in wheres]

    @property
    def figures(self) -> m.MasterStatistics:
        return self.master.statistics()
