"""Replicas, pins, groups, tenants, quotas and planned copies, in any order, against a dictionary.

`test_master.py` has nodes and clients that die; here nobody does, so that more can be demanded: a
hard-pinned block stays until it is removed, a quota is never exceeded, copies lie apart, and a
range that is leased or being written is given to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from configs.kvstore import Eviction
from kvstore.checksum import table_bytes
from kvstore.master.books.allocator import padded
from kvstore.master.books.tenants import TenantRule
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.wire import messages as m

TIMING = MasterTiming(lease_s=6.0, silence_s=1e6, put_s=20.0, soft_pin_s=10.0)
QUOTA = 12 * 64
TENANTS = {"small": QUOTA, "large": None}
NODES = {"a": "r1", "b": "r1", "c": "r2", "d": ""}  # and their failure domains
KEYS = {name: [name[:1].encode() * 15 + bytes([i]) for i in range(7)] for name in TENANTS}

tenants = st.sampled_from(sorted(TENANTS))
groups = st.sampled_from(["", "", "g", "h"])
pins = st.sampled_from(m.Pin)


@dataclass(frozen=True)
class Range:
    node: str
    segment: int
    start: int
    stop: int

    def meets(self, other: Range) -> bool:
        same = (self.node, self.segment) == (other.node, other.segment)
        return same and max(self.start, other.start) < min(self.stop, other.stop)


class FeatureMachine(RuleBasedStateMachine):
    eviction = Eviction.LRU

    def __init__(self):
        super().__init__()
        rules = [TenantRule(name=n, token=n, quota_bytes=q) for n, q in TENANTS.items()]
        self.master = StoreMaster(TIMING, eviction=self.eviction, tenants=rules)
        self.catalog = self.master._catalog
        self.master._parts.remove(self.master._planning)  # copies are this test's own
        self.now, self.batch = 0.0, 0
        self.contents: dict[bytes, tuple[int, int, int]] = {}  # length, checksum, chunk bytes
        self.hard: set[bytes] = set()
        self.writing: dict[tuple[int, int], tuple[str, bytes, Range]] = {}  # by batch and row
        self.leases: dict[int, tuple[str, list[Range]]] = {}
        self.planned: list[int] = []
        for node, domain in NODES.items():
            self.step(m.Register(node, node, 64 * 6, True, m.HeldBlocks(), domain=domain))
        disk = m.Register("d", "d", 4096 * 3, True, m.HeldBlocks(), 1, m.Medium.SSD, 4096)
        self.step(disk)
        for name in TENANTS:
            assert isinstance(self.step(m.Enter(name, name, name)), m.Entered)

    def step(self, request):
        reply = m.decode_reply(m.encode(self.master.step(request, self.now)))
        assert not isinstance(reply, m.Refused), reply
        return reply

    def range_of(self, where, offset, length, chunk_bytes):
        space = padded(length + table_bytes(length, chunk_bytes))
        return Range(where.node, where.segment, offset, offset + space)

    @rule(
        tenant=tenants,
        positions=st.lists(st.integers(0, 6), min_size=1, max_size=4),
        length=st.sampled_from([1, 64, 130]),
        chunk_bytes=st.sampled_from([0, 0, 32]),
        replicas=st.integers(1, 3),
        pin=pins,
        group=groups,
        media=st.sampled_from([[], [], [m.Medium.SSD], [m.Medium.SSD, m.Medium.DRAM]]),
        finish=st.booleans(),
    )
    def put(self, tenant, positions, length, chunk_bytes, replicas, pin, group, media, finish):
        self.batch += 1
        keys = [KEYS[tenant][i] for i in positions]
        columns = ([length] * len(keys), [7] * len(keys))
        request = m.Allocate(
            tenant,
            self.batch,
            keys,
            *columns,
            chunk_bytes=chunk_bytes,
            pin=pin,
            group=group,
            replicas=replicas,
            media=media,
        )
        reply = self.step(request)
        busy = [r for _, _, r in self.writing.values()]
        busy += [r for _, ranges in self.leases.values() for r in ranges]
        for position, (key, outcome) in enumerate(zip(keys, reply.outcomes, strict=True)):
            first = position * replicas
            rows = [i for i in range(first, first + replicas) if reply.node_idx[i] >= 0]
            assert bool(rows) == (outcome is m.PutOutcome.GRANTED)
            domains = [NODES[reply.nodes[reply.node_idx[i]].node] or "own" for i in rows]
            assert len(set(domains)) == len(domains)
            if outcome is m.PutOutcome.EXISTS:
                assert self.contents[key] == (length, 7, chunk_bytes)
                self.hard |= {key} if pin is m.Pin.HARD else set()
            for i in rows:
                where = reply.nodes[reply.node_idx[i]]
                given = self.range_of(where, reply.offsets[i], length, chunk_bytes)
                assert not any(given.meets(other) for other in busy), given
                busy.append(given)
                self.writing[(self.batch, i)] = (tenant, key, given)
                self.contents[key] = (length, 7, chunk_bytes)  # once it is committed
        if finish:
            self.finish_batch(self.batch, tenant, "commit", pin)

    def finish_batch(self, batch, tenant, how, pin=m.Pin.NONE):
        rows = [row for number, row in self.writing if number == batch]
        columns = ([], rows, []) if how == "abort" else (rows, [], [])
        keys = [self.writing.pop((batch, row))[1] for row in rows]
        reply = self.step(m.Finish(tenant, batch, *columns))
        for key, stored in zip(keys, reply.stored, strict=False):
            self.hard |= {key} if stored and pin is m.Pin.HARD and len(keys) == 1 else set()

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), how=st.sampled_from(["commit", "abort"]))
    def finish(self, data, how):
        batch, row = data.draw(st.sampled_from(sorted(self.writing)))
        self.finish_batch(batch, self.writing[(batch, row)][0], how)

    @rule(tenant=tenants, positions=st.lists(st.integers(0, 6), max_size=5), every=st.booleans())
    def lookup(self, tenant, positions, every):
        keys = [KEYS[tenant][i] for i in positions]
        flags = self.step(m.Exists(keys, tenant)).flags
        found = self.step(m.Lookup(tenant, keys, [], every))
        run = len(keys) if every else (*flags, False).index(False)
        assert [idx >= 0 for idx in found.node_idx] == flags[:run]
        ranges = []
        for i, idx in enumerate(found.node_idx):
            if idx < 0:
                continue
            chunk_bytes = found.chunk_bytes[i] if found.chunk_bytes else 0
            assert self.contents[keys[i]] == (found.lengths[i], found.checksums[i], chunk_bytes)
            where = found.nodes[idx]
            ranges.append(self.range_of(where, found.offsets[i], found.lengths[i], chunk_bytes))
        if found.lease_id:
            self.leases[found.lease_id] = (tenant, ranges)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), renew=st.booleans())
    def renew_or_release(self, data, renew):
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        tenant = self.leases[lease_id][0]
        if renew:
            assert self.step(m.Renew(tenant, [lease_id])).running == [True]
        else:
            del self.leases[lease_id]
            assert self.step(m.Release(tenant, [lease_id])).count == 1

    @rule(tenant=tenants, i=st.integers(0, 6), pin=pins, group=groups)
    def set_pin(self, tenant, i, pin, group):
        key = KEYS[tenant][i]
        members = {key, *self.catalog.groups.keys(self.group(tenant, group))}
        there = {k for k in members if self.catalog.copies(k)}
        assert self.step(m.SetPin(tenant, [key], pin, 3.0, group)).count == len(there)
        self.hard = self.hard | there if pin is m.Pin.HARD else self.hard - there

    @rule(tenant=tenants, i=st.integers(0, 6), group=groups)
    def remove(self, tenant, i, group):
        key = KEYS[tenant][i]
        members = {key, *self.catalog.groups.keys(self.group(tenant, group))}
        there = {k for k in members if self.catalog.copies(k)}
        assert self.step(m.Remove([key], tenant, group)).count == len(there)
        assert not any(self.step(m.Exists(sorted(members), tenant)).flags)
        self.hard -= members

    def group(self, tenant, label):
        number = self.catalog.tenants.find(tenant).number
        return self.catalog.groups.number(number, label) if label else 0

    @rule(data=st.data())
    def plan(self, data):
        rows = sorted(
            row for first in self.catalog.index for row in self.catalog.table.copies(first)
        )
        if rows:
            row = data.draw(st.sampled_from(rows))
            target = data.draw(st.sampled_from(list(self.catalog.pool)))
            copy_id = self.catalog.planned.open(row, target, self.now)
            self.planned += [] if copy_id is None else [copy_id]

    @precondition(lambda self: self.planned)
    @rule(data=st.data(), how=st.sampled_from(["commit", "abort", "unsure"]))
    def end_planned(self, data, how):
        copy_id = data.draw(st.sampled_from(self.planned))
        if how == "commit":
            self.catalog.planned.commit(copy_id, self.now)
        else:
            self.catalog.planned.abort(copy_id, at_rest=how == "abort")
        if how != "unsure":
            self.planned.remove(copy_id)
            assert self.catalog.planned.row(copy_id) is None

    @rule(seconds=st.sampled_from([0.5, 1.9, 5.0]))
    def time_passes(self, seconds):
        asleep = seconds > TIMING.lease_s / 3
        before = len(self.catalog.leases)
        self.now += seconds
        self.step(m.Observe())
        assert not asleep or len(self.catalog.leases) == before, "who slept ends no lease"
        ids = sorted(self.leases)
        running = [i in self.catalog.leases._leases for i in ids]
        self.leases = {i: self.leases[i] for i, runs in zip(ids, running, strict=True) if runs}

    @invariant()
    def books_agree(self):
        self.master.check_invariants()

    @invariant()
    def nobody_has_more_than_its_quota(self):
        for tenant in self.step(m.ListTenants()).tenants:
            assert tenant.quota_bytes is None or tenant.used_bytes <= tenant.quota_bytes

    @invariant()
    def what_is_pinned_hard_is_there(self):
        assert all(self.catalog.copies(key) for key in self.hard)


class PrefixFeatures(FeatureMachine):
    eviction = Eviction.PREFIX_AWARE


TestFeatures, TestPrefixFeatures = FeatureMachine.TestCase, PrefixFeatures.TestCase
TestFeatures.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
TestPrefixFeatures.settings = settings(TestFeatures.settings, max_examples=6)
