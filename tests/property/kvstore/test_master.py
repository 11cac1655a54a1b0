"""The store master against a dictionary, under any order of requests, with time as input.

The model knows contents, not places: which keys were committed with which checksum, who writes
what. What the master may forget on its own (eviction, silence, bad reports) the model learns from
the master's answers; what it may never do (show bytes that were not committed, give out bytes
that somebody may read or write, lose count of a byte) is checked after each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from configs.schema import Eviction
from kvstore.master import opening
from kvstore.master.books.allocator import padded
from kvstore.master.books.copy_state import OPEN, QUARANTINED
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.wire import messages as m

KEYS = [bytes([i]) * 16 for i in range(8)]
NODES = [f"node{i}" for i in range(3)]
CLIENTS = [*NODES, "client3"]  # workers are node and client in one
CAPACITY = 64 * 6
TIMING = MasterTiming(lease_s=5.0, silence_s=8.0, put_s=6.0)

keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
clients = st.sampled_from(CLIENTS)


@dataclass
class Put:
    client: str
    batch: int
    position: int
    key: bytes
    length: int
    checksum: int
    node: str
    offset: int
    over: bool = False  # the writer has answered for it, or is dead


@dataclass
class Lease:
    client: str
    deadline: float
    ranges: list[tuple[str, int, int]] = field(default_factory=list)


class MasterMachine(RuleBasedStateMachine):
    eviction = Eviction.LRU
    medium = m.Medium.DRAM

    def __init__(self):
        super().__init__()
        self.master = StoreMaster(TIMING, eviction=self.eviction)
        self.now = 100.0
        self.committed: dict[bytes, tuple[int, int]] = {}  # key -> (length, checksum)
        self.puts: list[Put] = []
        self.places: list[Put] = []  # reserved: without a key
        self.leases: dict[int, Lease] = {}
        self.fenced: set[str] = set()
        self.heard: dict[str, float] = {}
        self.batch = 0
        self.shares = opening.RESERVED_SHARE, opening.DISK_SHARE
        opening.RESERVED_SHARE = opening.DISK_SHARE = 0.5

    def teardown(self):
        opening.RESERVED_SHARE, opening.DISK_SHARE = self.shares

    def step(self, request):
        return self.master.step(request, self.now)

    def tell(self, client, request):
        reply = self.step(request)
        if client in self.fenced:
            assert isinstance(reply, m.Refused)
            assert reply.reason is m.RefusalReason.FENCED
            return None
        assert not isinstance(reply, m.Refused), reply
        return reply

    def request(self, client, wanted, lengths, checksums, pin):
        return m.Allocate(
            client=client,
            batch=self.batch,
            keys=wanted,
            lengths=lengths,
            checksums=checksums,
            pin=m.Pin.HARD if pin else m.Pin.NONE,
        )

    def is_there(self, key):
        """For writers: what was reported is hidden from readers while its node is silent."""
        return bool(self.master._catalog.copies(key))

    def living(self, node):
        """Ask the master without changing anything that the model follows."""
        return self.master._catalog.pool.node(node) is not None

    @initialize()
    def first_node(self):
        self.register(NODES[0])

    @rule(node=st.sampled_from(NODES))
    def register(self, node):
        was_there = self.living(node)
        request = m.Register(
            node, f"{node}:1", CAPACITY, not was_there, m.HeldBlocks(), medium=self.medium
        )
        if self.tell(node, request) is not None:
            self.heard[node] = self.now
            if not was_there:  # a new segment: whatever was in an old one is gone
                self.forget_ranges(node)

    def forget_ranges(self, node):
        self.puts = [put for put in self.puts if put.node != node]
        self.places = [place for place in self.places if place.node != node]
        for lease in self.leases.values():
            lease.ranges = [r for r in lease.ranges if r[0] != node]

    def named(self, client, wanted, data):
        """Places of a client for the first of these keys, whose blocks are written there early."""
        held = [place for place in self.places if place.client == client]
        count = data.draw(st.integers(0, min(len(held), len(wanted))))
        return data.draw(st.permutations(held))[:count]

    @rule(client=clients, wanted=keys, pin=st.booleans(), data=st.data())
    def allocate(self, client, wanted, pin, data):
        self.batch += 1
        lengths = [data.draw(st.sampled_from([1, 64, 100, 200])) for _ in wanted]
        checksums = [data.draw(st.integers(0, 1)) for _ in wanted]
        places = self.named(client, wanted, data)
        for position, place in enumerate(places):
            if data.draw(st.integers(0, 3)):  # nearly always it fits
                lengths[position] = place.length
        more = list(range(self.batch + 1, self.batch + 1 + data.draw(st.integers(0, 3))))
        request = replace(
            self.request(client, wanted, lengths, checksums, pin),
            places=[place.batch for place in places],
            more=more,
            more_bytes=64 if more else 0,
        )
        self.step(m.Observe())
        before = {key: self.is_there(key) for key in wanted}
        usable = {
            position: place
            for position, place in enumerate(places)
            if self.is_open(place) and padded(place.length) == padded(lengths[position])
        }
        reply = self.tell(client, request)
        self.batch += len(more)
        if reply is None:
            return
        for position, place in usable.items():
            if reply.outcomes[position] is m.PutOutcome.GRANTED:
                found = reply.nodes[reply.node_idx[position]].node, reply.offsets[position]
                assert found == (place.node, place.offset), "written there already"
                self.places.remove(place)
        first, reply = reply, self.tell(client, request)  # as if the first reply was lost
        for position, outcome in enumerate(first.outcomes):
            if outcome is m.PutOutcome.GRANTED:
                assert reply.outcomes[position] is outcome
                assert reply.offsets[position] == first.offsets[position]
        others = {node.name for node in self.master._catalog.pool.nodes} - {client}
        for position, key in enumerate(wanted):
            outcome = reply.outcomes[position]
            holder = [p for p in self.open_puts() if p.key == key]
            if outcome in (m.PutOutcome.EXISTS, m.PutOutcome.CONFLICT):
                same = self.committed[key] == (lengths[position], checksums[position])
                assert before[key]
                assert same == (outcome is m.PutOutcome.EXISTS)
            elif outcome is m.PutOutcome.IN_PROGRESS:
                assert holder
            elif outcome is m.PutOutcome.GRANTED:
                assert not holder
                node = reply.nodes[reply.node_idx[position]].node
                offset, length = reply.offsets[position], lengths[position]
                self.assert_untouched(node, offset, length)
                if node == client and lengths[position] <= 64 and position == 0 and not usable:
                    assert all(self.full(other) for other in others), "not its own node first"
                put = Put(
                    client, request.batch, position, key, length, checksums[position], node, offset
                )
                self.puts.append(put)
        self.granted_ahead(client, more, reply)

    def granted_ahead(self, client, more, reply):
        """Note what was opened for the next put."""
        assert (reply.ahead is None) == (not more)
        if not more:
            return
        ahead = reply.ahead
        for number, index, offset in zip(more, ahead.node_idx, ahead.offsets, strict=False):
            self.granted(client, number, 64, m.Place(ahead.nodes[index], offset))

    def full(self, node):
        segment = self.master._catalog.pool.find(node, 0)
        has_room = segment.free >= 64 or segment.victim() is not None
        return not has_room or segment.placeable_s > self.now

    def open_puts(self):
        held = self.master._catalog.puts.writers
        return [p for p in self.puts if not p.over and p.key in held and self.is_open(p)]

    def is_open(self, put):
        batch = self.master._catalog.puts.find(put.client, put.batch)
        row = None if batch is None else batch.rows.get(put.position)
        return row is not None and self.master._catalog.table.state[row] == OPEN

    def assert_untouched(self, node, offset, length):
        """Nobody who may still write or read there was overruled."""
        mine = range(offset, offset + padded(length))
        for put in self.puts + self.places:
            if put.node == node and not put.over:
                theirs = range(put.offset, put.offset + padded(put.length))
                assert max(mine.start, theirs.start) >= min(mine.stop, theirs.stop), put
        for lease in self.leases.values():
            for where, start, size in lease.ranges:
                if where == node and lease.deadline > self.now:
                    stop = start + padded(size)
                    assert max(mine.start, start) >= min(mine.stop, stop), lease

    @rule(client=clients, wanted=keys, pin=st.booleans())
    def store(self, client, wanted, pin):
        """A put that goes well, so that there is something to read."""
        self.batch += 1
        lengths, checksums = [64] * len(wanted), [0] * len(wanted)
        request = self.request(client, wanted, lengths, checksums, pin)
        reply = self.tell(client, request)
        if reply is None:
            return
        granted = [i for i, outcome in enumerate(reply.outcomes) if outcome == "granted"]
        for i in granted:
            node = reply.nodes[reply.node_idx[i]].node
            self.assert_untouched(node, reply.offsets[i], 64)
        finished = self.tell(client, m.Finish(client, self.batch, granted))
        assert finished.stored == [True] * len(granted)
        self.committed.update({wanted[i]: (64, 0) for i in granted})

    @precondition(lambda self: self.puts)
    @rule(data=st.data(), how=st.sampled_from(["commit", "abort", "unsettled"]))
    def finish(self, data, how):
        put = data.draw(st.sampled_from(self.puts))
        columns = {
            "commit": ([put.position], [], []),
            "abort": ([], [put.position], []),
            "unsettled": ([], [], [put.position]),
        }
        was_open = self.is_open(put)
        reply = self.tell(put.client, m.Finish(put.client, put.batch, *columns[how]))
        if reply is None or how == "unsettled":
            return
        put.over = True
        self.puts.remove(put)
        if how == "commit" and reply.stored[0]:
            assert was_open
            self.committed[put.key] = (put.length, put.checksum)

    def granted(self, client, batch, length, place):
        """Note a reserved place, if there is one."""
        if place is not None:
            self.assert_untouched(place.where.node, place.offset, length)
            mine = Put(client, batch, 0, b"", length, 0, place.where.node, place.offset)
            self.places.append(mine)

    @rule(client=clients, length=st.sampled_from([1, 64, 100, 200]))
    def reserve(self, client, length):
        self.batch += 1
        request = m.Reserve(client, KEYS[0], self.batch, length)
        reply = self.tell(client, request)
        if reply is not None:
            self.granted(client, self.batch, length, reply.place)
            assert self.tell(client, request) == reply, "as if the first reply was lost"

    @precondition(lambda self: self.places)
    @rule(data=st.data(), key=st.sampled_from(KEYS), checksum=st.integers(0, 1), pin=st.booleans())
    def store_reserved(self, data, key, checksum, pin):
        """A put in one request, which is sent twice."""
        place = data.draw(st.sampled_from(self.places))
        following = self.batch + 1
        more = list(range(following + 1, following + 1 + data.draw(st.integers(0, 3))))
        self.batch = following + len(more)
        soon = list(range(self.batch + 1, self.batch + 1 + data.draw(st.integers(0, 2))))
        self.batch += len(soon)
        request = m.Store(
            place.client, place.batch, key, place.length, checksum, following, more,
            m.Pin.HARD if pin else m.Pin.NONE, soon=soon,
        )  # fmt: skip
        self.step(m.Observe())
        was_open, there = self.is_open(place), self.is_there(key)
        holder = [put for put in self.open_puts() if put.key == key]
        reply = self.tell(place.client, request)
        if reply is None:
            return
        self.places.remove(place)
        if not was_open:
            assert reply.outcome is m.PutOutcome.FAILED
        elif there:
            same = self.committed[key] == (place.length, checksum)
            assert reply.outcome is (m.PutOutcome.EXISTS if same else m.PutOutcome.CONFLICT)
        else:
            assert reply.outcome is (m.PutOutcome.IN_PROGRESS if holder else m.PutOutcome.STORED)
        assert (reply.place is None) == (reply.outcome in (m.PutOutcome.STORED, "failed"))
        assert len(reply.more) <= (len(more) if reply.outcome is m.PutOutcome.STORED else 0)
        if reply.outcome is m.PutOutcome.STORED:
            self.committed[key] = (place.length, checksum)
        elif was_open:
            found = (reply.place.where.node, reply.place.offset)
            assert found == (place.node, place.offset), "what was not used is the writer's still"
        self.granted(place.client, following, place.length, reply.place)
        for number, further in zip(more, reply.more, strict=False):
            self.granted(place.client, number, place.length, further)
        if data.draw(st.booleans()):  # the server has time for it before the next request
            self.master.grant_wishes(self.now)
        repeated = self.tell(place.client, request)
        assert repeated.outcome is m.PutOutcome.FAILED
        assert (repeated.place, repeated.more) == (reply.place, reply.more)
        finished = self.tell(place.client, m.Finish(place.client, following, [0]))
        assert finished.stored == [False], "a place without a key is no block"
        for number in soon:
            wanted = m.Reserve(place.client, KEYS[0], number, place.length)
            self.granted(place.client, number, place.length, self.tell(place.client, wanted).place)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def give_back(self, data):
        place = data.draw(st.sampled_from(self.places))
        request = m.Reserve(place.client, KEYS[0], abandoned=[place.batch])
        if self.tell(place.client, request) is None:
            return
        self.places.remove(place)
        late = m.Store(place.client, place.batch, KEYS[0], place.length, 0, self.batch + 1)
        assert self.tell(place.client, late).outcome is m.PutOutcome.FAILED

    @precondition(lambda self: self.committed)
    @rule(client=clients, data=st.data(), beyond=keys)
    def lookup(self, client, data, beyond):
        there = sorted(self.committed)
        wanted = data.draw(st.lists(st.sampled_from(there), max_size=3, unique=True))
        wanted += [key for key in beyond if key not in wanted]
        flags = self.step(m.Exists(wanted)).flags
        reply = self.tell(client, m.Lookup(client, wanted))
        if reply is None:
            return
        run = len(reply.offsets)
        assert flags[:run] == [True] * run
        assert run == len(wanted) or not flags[run]
        assert (reply.lease_id > 0) == (run > 0)
        lease = Lease(client, self.now + TIMING.lease_s)
        for i in range(run):
            assert self.committed[wanted[i]] == (reply.lengths[i], reply.checksums[i])
            node = reply.nodes[reply.node_idx[i]].node
            lease.ranges.append((node, reply.offsets[i], reply.lengths[i]))
        if run:
            self.leases[reply.lease_id] = lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases.pop(lease_id)
        self.tell(lease.client, m.Release(lease.client, [lease_id]))

    @precondition(lambda self: self.committed)
    @rule(wanted=keys)
    def remove(self, wanted):
        self.step(m.Remove(wanted))
        assert self.step(m.Exists(wanted)).flags == [False] * len(wanted)

    @rule(client=clients, wanted=keys, corrupt=st.booleans())
    def report(self, client, wanted, corrupt):
        for key in wanted:
            catalog = self.master._catalog
            rows = catalog.copies(key)
            if not rows or client in self.fenced:
                continue
            node, there = catalog.pool.of(rows[0]).node.name, catalog.table.offset[rows[0]]
            for offset in (there + 64, there):
                request = m.ReportBad(client, [key], [node], [offset], [corrupt])
                dropped = self.tell(client, request).count
                assert dropped == 0 or offset == there
                if corrupt and offset == there:
                    assert dropped == 1

    @rule(name=clients, dead=st.booleans())
    def fence(self, name, dead):
        if len(self.fenced | {name}) > 2:
            return  # somebody has to go on
        self.step(m.Fence([name], dead))
        self.fenced.add(name)
        self.forget_ranges(name)
        self.leases = {i: lease for i, lease in self.leases.items() if lease.client != name}
        if dead:
            self.puts = [put for put in self.puts if put.client != name]
            self.places = [place for place in self.places if place.client != name]

    @rule(
        seconds=st.sampled_from([0.1, 1.0, 2.5, 3.9, 9.0]), speaking=st.sets(st.sampled_from(NODES))
    )
    def time_passes(self, seconds, speaking):
        self.now += seconds
        before = {node for node in NODES if self.living(node)}
        self.step(m.Observe())
        stalled = seconds > TIMING.silence_s / 2  # who did not listen accuses nobody
        assert not stalled or before == {node for node in NODES if self.living(node)}
        for node in NODES:
            if node in self.heard and not self.living(node):
                del self.heard[node]
                self.forget_ranges(node)
        for node in sorted(speaking - self.fenced):
            known = self.tell(node, m.Heartbeat(node)).known
            assert known == self.living(node)

    @invariant()
    def adds_up(self):
        self.master.check_invariants()
        figures = self.master.statistics()
        assert figures.capacity_bytes == (
            figures.free_bytes
            + figures.committed_bytes
            + figures.open_bytes
            + figures.retired_bytes
            + figures.quarantined_bytes
        )
        assert figures.blocks <= len(self.committed)

    @invariant()
    def ranges_are_kept(self):
        """Open and quarantined puts and leased extents are still somebody's."""
        for put in self.puts + self.places:
            segment = self.master._catalog.pool.find(put.node, 0)
            if segment is not None:
                table = self.master._catalog.table
                rows = table.rows_in(segment.index, OPEN, QUARANTINED)
                assert (put.offset, put.key) in {(table.offset[r], table.keys[r]) for r in rows}


class FifoMachine(MasterMachine):
    eviction = Eviction.S3_FIFO


class PrefixMachine(MasterMachine):
    eviction = Eviction.PREFIX_AWARE


class DiskMachine(MasterMachine):
    medium = m.Medium.SSD


TestMaster, TestFifo, TestPrefix, TestDisks = (
    machine.TestCase for machine in (MasterMachine, FifoMachine, PrefixMachine, DiskMachine)
)
TestMaster.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFifo.settings = TestPrefix.settings = TestDisks.settings = settings(
    TestMaster.settings, max_examples=20
)
