"""What the master does by itself, step by step: drains, tiers, replicas, joined nodes."""

from __future__ import annotations

import secrets

import pytest

from configs.kvstore_policies import (
    Admission,
    CopyBounds,
    FillingPolicy,
    HotBlockPolicy,
    PolicyConfig,
    TierPolicy,
)
from kvstore.events.event_log import Medium as EventMedium
from kvstore.master.books.tenants import TenantRule
from kvstore.wire import messages as m
from tests.support.planned_pool import LENGTH, PlannedPool

DRAM, SSD = m.Medium.DRAM, m.Medium.SSD


def fresh(number):
    return [secrets.token_bytes(16) for _ in range(number)]


def quiet(**changes) -> PolicyConfig:
    """Nothing but what a test asks for."""
    calm = {"filling": FillingPolicy(bytes_per_s=0), "tiers": TierPolicy(promotion_hits=0)}
    return PolicyConfig(**{**calm, **changes})


class TestDraining:
    def test_everything_moves_and_then_nothing_is_left(self):
        pool = PlannedPool(quiet())
        pool.join("a", 64)
        pool.join("b", 64)
        keys = fresh(40)
        pool.put(keys, client="b")
        assert pool.on("a") == 40
        first = pool.step(m.Drain("a"))
        assert (first.left_blocks, first.moved_blocks) == (40, 0)
        assert pool.put(fresh(1), client="b") == [m.PutOutcome.GRANTED]
        assert pool.on("a") == 40, "nothing new is placed there"
        pool.work("a")
        report = pool.step(m.Drain("a"))
        assert (report.left_blocks, report.left_bytes, report.stuck_blocks) == (0, 0, 0)
        assert report.moved_blocks == 40
        assert pool.there(keys) == 40
        pool.step(m.Leave("a"))
        assert pool.there(keys) == 40

    def test_what_fits_nowhere_is_stuck_until_there_is_room(self):
        pool = PlannedPool(quiet())
        pool.join("a", 64)
        pool.join("b", 10)
        keys = fresh(30)
        pool.put(keys, client="b")
        pool.step(m.Drain("a"))
        pool.work("a")
        report = pool.step(m.Drain("a"))
        assert (report.left_blocks, report.stuck_blocks, report.moved_blocks) == (20, 20, 10)
        assert pool.there(keys) == 30, "nothing is lost for it"
        pool.join("c", 64)
        pool.settle()
        report = pool.step(m.Drain("a"))
        assert (report.left_blocks, report.stuck_blocks, report.moved_blocks) == (0, 0, 30)
        assert pool.there(keys) == 30

    def test_a_copy_elsewhere_is_enough_unless_two_were_wanted(self):
        pool = PlannedPool(quiet())
        for node in "abc":
            pool.join(node, 64)
        two = fresh(8)
        pool.put(two, replicas=2)
        pool.step(m.Drain("a"))
        pool.settle()
        assert pool.on("a") == 0
        assert all([node for node, _ in pool.places(key)] == ["b", "c"] for key in two)

    def test_leased_bytes_stay_until_their_reader_is_done(self):
        pool = PlannedPool(quiet())
        pool.join("a", 64)
        pool.join("b", 64)
        keys = fresh(4)
        pool.put(keys, client="b")
        hit = pool.read(keys, release=False)
        pool.step(m.Drain("a"))
        pool.work("a")
        assert pool.step(m.Drain("a")).left_blocks == 4, "still read"
        pool.step(m.Release("reader", [hit.lease_id]))
        assert pool.step(m.Drain("a")).left_blocks == 0
        assert pool.there(keys) == 4

    def test_a_put_that_began_before_is_moved_too(self):
        pool = PlannedPool(quiet())
        pool.join("a", 64)
        pool.join("b", 64)
        (key,) = fresh(1)
        granted = pool.step(
            m.Allocate(client="b", batch=1, keys=[key], lengths=[LENGTH], checksums=[7])
        )
        assert pool.step(m.Drain("a")).left_blocks == 1
        pool.bytes[("a", 0, granted.offsets[0])] = key
        pool.step(m.Finish(client="b", batch=1, committed=[0]))
        pool.settle()
        assert pool.step(m.Drain("a")).left_blocks == 0
        assert pool.places(key) == [("b", "dram")]

    def test_a_tenant_at_its_quota_is_drained_too(self):
        pool = PlannedPool(
            quiet(), tenants=[TenantRule(name="team", token="a token", quota_bytes=10 * LENGTH)]
        )
        pool.join("a", 64)
        pool.join("b", 64)
        pool.step(m.Enter("b", "team", "a token"))
        keys = fresh(10)
        assert pool.put(keys, client="b") == [m.PutOutcome.GRANTED] * 10
        pool.step(m.Drain("a"))
        pool.work("a")
        report = pool.step(m.Drain("a"))
        assert (report.left_blocks, report.stuck_blocks) == (0, 0)
        assert pool.step(m.ListTenants()).tenants[0].used_bytes == 10 * LENGTH

    def test_cancelling_lets_the_node_live_on(self):
        pool = PlannedPool(quiet(copies=CopyBounds(per_node=4)))
        pool.join("a", 64)
        pool.join("b", 64)
        keys = fresh(20)
        pool.put(keys, client="b")
        pool.step(m.Drain("a"))
        copies = pool.ask_work("a")
        assert len(copies) == 4
        report = pool.step(m.Drain("a", cancel=True))
        assert report.left_blocks == 20
        for copy in copies:
            pool.make("a", copy)
        pool.ask_work("a", done=[copy.copy_id for copy in copies])
        pool.settle()
        assert pool.on("a") == 16
        pool.put(fresh(1), client="b")
        assert pool.on("a") == 17

    def test_unknown_nodes_are_named(self):
        pool = PlannedPool(quiet())
        for request in (m.Drain("nobody"), m.Drain("nobody", cancel=True), m.NextCopies("nobody")):
            reply = pool.step(request)
            assert reply.reason is m.RefusalReason.UNKNOWN_NODE


class TestCopies:
    def test_a_node_hears_of_work_by_its_heartbeat(self):
        pool = PlannedPool(quiet())
        pool.join("a", 64)
        pool.join("b", 64)
        pool.put(fresh(2), client="b")
        assert not pool.step(m.Heartbeat("a")).copies
        pool.step(m.Drain("a"))
        assert pool.step(m.Heartbeat("a")).copies
        pool.work("a")
        assert not pool.step(m.Heartbeat("a")).copies

    def test_an_unreported_copy_is_quarantined_and_settled_by_a_late_report(self):
        pool = PlannedPool(quiet(copies=CopyBounds(deadline_s=5.0, attempts=1)))
        pool.join("a", 64)
        pool.join("b", 64)
        keys = fresh(1)
        pool.put(keys, client="b")
        pool.step(m.Drain("a"))
        (copy,) = pool.ask_work("a")
        figures = pool.step(m.Observe(), later=5.5)
        assert figures.quarantined_bytes == LENGTH
        pool.make("a", copy)
        pool.ask_work("a", done=[copy.copy_id], limit=0)
        assert pool.step(m.Observe()).quarantined_bytes == 0
        pool.settle()
        assert pool.places(keys[0]) == [("b", "dram")]

    def test_a_lost_reply_loses_no_copy(self):
        pool = PlannedPool(quiet())
        pool.join("a", 64)
        pool.join("b", 64)
        keys = fresh(6)
        pool.put(keys, client="b")
        pool.step(m.Drain("a"))
        first = pool.ask_work("a", turn=1, limit=4)
        assert pool.ask_work("a", turn=1, limit=4) == first
        for copy in first:
            pool.make("a", copy)
        done = [copy.copy_id for copy in first]
        rest = pool.ask_work("a", turn=2, done=done)
        assert len(rest) == 2
        assert pool.ask_work("a", turn=2, done=done) == rest
        for copy in rest:
            pool.make("a", copy)
        assert pool.ask_work("a", turn=3, done=[copy.copy_id for copy in rest]) == []
        assert pool.step(m.Drain("a")).left_blocks == 0
        assert pool.there(keys) == 6

    def test_a_new_master_takes_no_report_of_an_old_ones_copies(self):
        old, new = PlannedPool(quiet()), PlannedPool(quiet(), last_copy_id=1000)
        for pool in (old, new):
            pool.join("a", 64)
            pool.join("b", 64)
            pool.put(fresh(2), client="b")
            pool.step(m.Drain("a"))
        ids = [copy.copy_id for copy in old.ask_work("a")]
        assert not set(ids) & {copy.copy_id for copy in new.ask_work("a")}
        new.ask_work("a", done=ids)
        assert new.on("a") == 2, "nothing was committed that was not written"

    def test_a_corrupt_source_is_dropped_and_counted(self):
        pool = PlannedPool(quiet())
        pool.join("a", 64)
        pool.join("b", 64)
        keys = fresh(2)
        pool.put(keys, client="b")
        pool.step(m.Drain("a"))
        bad, good = pool.ask_work("a")
        pool.make("a", good)
        pool.ask_work("a", done=[good.copy_id], corrupt=[bad.copy_id])
        assert pool.step(m.Observe()).corrupt_blocks == 1
        assert pool.there(keys) == 1
        assert pool.on("a") == 0

    def test_a_source_that_was_put_anew_is_not_the_one_that_was_corrupt(self):
        pool = PlannedPool(quiet())
        pool.join("a", 64)
        pool.join("b", 64)
        (key,) = fresh(1)
        pool.put([key], client="b")
        pool.step(m.Drain("a"))
        (copy,) = pool.ask_work("a")
        # A reader finds out first, and puts it again while the node's word is on its way.
        bad = m.ReportBad("reader", [key], ["a"], [copy.source_offset], [True], [0])
        assert pool.step(bad) == m.Done(1)
        pool.step(m.Drain("a", cancel=True))
        pool.put([key], client="b")
        assert pool.places(key) == [("a", "dram")]
        pool.ask_work("a", corrupt=[copy.copy_id])
        assert pool.places(key) == [("a", "dram")]

    def test_a_block_that_is_put_anew_has_as_many_copies_as_are_asked_for_now(self):
        pool = PlannedPool(quiet())
        pool.join("a", 64)
        pool.join("b", 64)
        (key,) = fresh(1)
        pool.put([key], replicas=2)
        for where, _ in pool.places(key):  # a reader finds both of them bad, one after the other
            bad = m.ReportBad("reader", [key], [where], [0], [True], [0])
            assert pool.step(bad, later=1.0) == m.Done(1)
            pool.step(m.Observe(), later=1.0)  # the one that is left is to be copied
        pool.put([key], prefer=[where])  # to where it was to be copied from
        assert pool.places(key) == [(where, "dram")]
        pool.settle()
        assert pool.places(key) == [(where, "dram")]
        assert pool.step(m.Observe()).replicated_blocks == 0

    @pytest.mark.parametrize("lost", ["a", "b"])
    def test_a_copy_whose_node_is_lost_ends(self, lost):
        pool = PlannedPool(quiet())
        pool.join("a", 64)
        pool.join("b", 64)
        keys = fresh(3)
        pool.put(keys, client="b")
        pool.step(m.Drain("a"))
        copies = pool.ask_work("a")
        for copy in copies:
            pool.make("a", copy)
        pool.step(m.Fence([lost], dead=False))
        if lost == "b":
            pool.ask_work("a", done=[copy.copy_id for copy in copies])
        pool.step(m.Fence([lost], dead=True))
        figures = pool.step(m.Observe())
        assert (figures.open_bytes, figures.quarantined_bytes) == (0, 0)
        assert pool.there(keys) == (0 if lost == "a" else 3)


class TestTiers:
    def tiered(self, **policy) -> PlannedPool:
        tiers = TierPolicy(**{"demotion_low": 0.2, "demotion_high": 0.5, **policy})
        pool = PlannedPool(quiet(tiers=tiers))
        pool.join("a", 20)
        pool.join("a", 60, medium=SSD, segment=1)
        return pool

    def fill(self, pool, keys):
        for key in keys:
            pool.put([key])
            pool.settle(seconds=0.1)

    def test_nearly_full_dram_is_demoted_before_it_is_evicted(self):
        pool = self.tiered(promotion_hits=0)
        keys = fresh(50)
        self.fill(pool, keys)
        figures = pool.step(m.Observe())
        assert (figures.evicted_blocks, pool.there(keys)) == (0, 50)
        assert pool.used("a") <= 0.85
        assert pool.places(keys[0]) == [("a", "ssd")]
        assert pool.places(keys[-1]) == [("a", "dram")]

    def test_a_full_ssd_evicts_its_oldest(self):
        pool = self.tiered(promotion_hits=0)
        keys = fresh(150)
        self.fill(pool, keys)
        assert pool.there(keys) >= 65
        assert pool.there(keys[:50]) == 0

    def test_blocks_that_were_never_used_again_are_not_admitted(self):
        pool = self.tiered(promotion_hits=0, admission=Admission.SECOND_HIT)
        keys = fresh(12)
        self.fill(pool, keys)
        pool.read(keys[::2])
        self.fill(pool, fresh(60))
        assert all(pool.places(key) == [("a", "ssd")] for key in keys[::2])
        assert pool.there(keys[1::2]) == 0

    def test_hits_on_the_ssd_bring_a_block_back(self):
        pool = self.tiered(promotion_hits=2)
        keys = fresh(40)
        self.fill(pool, keys)
        assert pool.places(keys[0]) == [("a", "ssd")]
        pool.read(keys[:1])
        pool.settle(seconds=0.5)
        assert pool.places(keys[0]) == [("a", "ssd")]
        pool.read(keys[:1])
        pool.settle(seconds=0.5)
        assert pool.places(keys[0]) == [("a", "dram")]

    def test_subscribers_hear_of_each_change_of_tier(self):
        pool = self.tiered(promotion_hits=1)
        keys = fresh(40)
        self.fill(pool, keys)
        assert (keys[0], EventMedium.SSD) in pool.told_media()
        assert (keys[0], EventMedium.DRAM) not in pool.told_media()
        pool.read(keys[:1])
        pool.settle(seconds=0.5)
        assert (keys[0], EventMedium.DRAM) in pool.told_media()
        assert (keys[0], EventMedium.SSD) not in pool.told_media()

    def test_leased_blocks_are_not_demoted_from_under_their_readers(self):
        pool = self.tiered(promotion_hits=0)
        keys = fresh(10)
        self.fill(pool, keys)
        hit = pool.read(keys, release=False)
        self.fill(pool, fresh(30))
        for key, node, offset in zip(keys, hit.node_idx, hit.offsets, strict=True):
            where = hit.nodes[node]
            assert pool.bytes[(where.node, where.segment, offset)] == key

    def test_without_an_ssd_nothing_is_evicted_ahead(self):
        pool = PlannedPool(quiet())
        pool.join("a", 20)
        keys = fresh(20)
        self.fill(pool, keys)
        assert (pool.there(keys), pool.used("a")) == (20, 1.0)


class TestReplicas:
    def test_a_lost_replica_is_made_again_on_another_domain(self):
        pool = PlannedPool(quiet())
        for node in "abcd":
            pool.join(node, 64, domain="rack" if node in "cd" else "")
        keys = fresh(12)
        pool.put(keys, replicas=2)
        pool.step(m.Fence(["a"], dead=True))
        pool.settle()
        for key in keys:
            places = pool.places(key)
            assert len(places) == 2
            assert len({"rack" if node in "cd" else node for node, _ in places}) == 2
        assert pool.there(keys) == 12

    @pytest.mark.parametrize("copies", [1, 2])
    def test_who_stores_a_lost_block_anew_says_how_many_copies(self, copies):
        pool = PlannedPool(quiet())
        for node in "ab":
            pool.join(node, 64, domain=node)
        (key,) = fresh(1)
        pool.put([key], replicas=2)
        rows = pool.catalog.copies(key)
        wheres = [pool.catalog.pool.of(row).where for row in rows]
        offsets = [pool.catalog.table.offset[row] for row in rows]
        for where, offset in zip(wheres, offsets, strict=True):  # one by one, as readers find out
            pool.step(m.ReportBad("reader", [key], [where.node], [offset], [True], [0]))
        assert not pool.there([key])
        pool.put([key], replicas=copies)
        pool.settle()
        assert len(pool.places(key)) == copies

    def test_what_was_removed_or_evicted_is_not_made_again(self):
        pool = PlannedPool(quiet())
        for node in "abc":
            pool.join(node, 8)
        keys = fresh(4)
        pool.put(keys, replicas=2)
        pool.step(m.Remove(keys=keys))
        assert pool.settle() == 0
        pool.put(keys, replicas=2)
        for key in fresh(60):
            pool.put([key])
        assert pool.settle() == 0

    def test_what_is_read_very_often_gets_further_replicas(self):
        hot = HotBlockPolicy(hits=20, window_s=1e6, replicas_max=3)
        pool = PlannedPool(quiet(hot_blocks=hot))
        for node in "abcd":
            pool.join(node, 64)
        hot_key, cold_key = fresh(2)
        pool.put([hot_key, cold_key])
        for _ in range(100):
            pool.read([hot_key])
            pool.settle(seconds=0.05)
        assert len(pool.places(hot_key)) == 3
        assert len(pool.places(cold_key)) == 1


class TestBalance:
    def test_a_joined_node_is_filled_slowly(self):
        pool = PlannedPool(quiet(filling=FillingPolicy(bytes_per_s=10 * LENGTH)))
        pool.join("a", 100)
        pool.join("b", 100)
        keys = fresh(160)
        pool.put(keys)
        pool.settle(seconds=2.0)
        pool.join("c", 100)
        began = pool.now
        shares = []
        while pool.now - began < 10.0:
            pool.settle(seconds=0.5)
            shares.append(pool.on("c"))
            assert pool.on("c") <= 10 * (pool.now - began + 1.0) + 1
        assert shares[2] < 30
        assert 45 <= pool.on("c") <= 55
        assert pool.there(keys) == 160
        assert pool.settle() == 0, "and then it is filled"

    def test_rebalance_moves_at_most_so_many_bytes(self):
        pool = PlannedPool(quiet())
        pool.join("a", 100)
        keys = fresh(90)
        pool.put(keys)
        pool.join("b", 100)
        assert pool.step(m.Rebalance(20 * LENGTH)).count == 20
        pool.settle()
        assert (pool.on("a"), pool.on("b")) == (70, 20)
        assert pool.step(m.Rebalance(1 << 40)).count == 25
        pool.settle()
        assert (pool.on("a"), pool.on("b"), pool.there(keys)) == (45, 45, 90)
        assert pool.step(m.Rebalance(1 << 40)).count == 0


class TestInventory:
    def test_pages_filters_and_places(self):
        pool = PlannedPool(quiet())
        pool.join("a", 100)
        pool.join("a", 100, medium=SSD, segment=1)
        keys = fresh(50)
        pool.put(keys[:30])
        pool.put(keys[30:], media=[SSD], pin=m.Pin.HARD)
        hit = pool.read(keys[:1], release=False)
        assert hit.lease_id
        listed, after, more = [], b"", True
        while more:
            page = pool.step(m.ListBlocks(after=after, limit=7))
            listed += page.keys
            after, more = page.keys[-1], page.more
            for key, pin, leased, copies, offsets in zip(
                page.keys, page.pins, page.leased, page.copies, page.offsets, strict=True
            ):
                assert leased == (key == keys[0])
                assert pin is (m.Pin.HARD if key in keys[30:] else m.Pin.NONE)
                (copy,), (offset,) = copies, offsets
                where = page.nodes[copy]
                assert where.medium is (SSD if key in keys[30:] else DRAM)
                assert pool.bytes[(where.node, where.segment, offset)] == key
        assert listed == sorted(keys)
        assert pool.step(m.ListBlocks(tenant="nobody")).keys == []
        assert pool.step(m.ListBlocks(group="none")).keys == []
        assert len(pool.step(m.ListBlocks(group="", tenant="")).keys) == 50
        segments = pool.step(m.ListSegments()).segments
        assert [(s.where.segment, s.blocks) for s in segments] == [(0, 30), (1, 20)]
        assert segments[0].free_bytes == 70 * LENGTH
