"""Segments, replicas, pins, groups, leases and planned copies of the master."""

from __future__ import annotations

import math

import pytest

from kvstore.master.books.tenants import TenantRule
from kvstore.master.store_master import MasterTiming
from kvstore.wire import messages as m
from tests.support.master_scene import BLOCK, Scene, key


def test_a_node_lends_several_segments_and_shares_of_them():
    scene = Scene()
    scene.register("a", blocks=2, base=0)
    scene.register("a", blocks=128, segment=1, medium=m.Medium.SSD, base=4096)
    assert scene.figures.nodes == 1
    assert scene.figures.segments == 2
    assert (scene.figures.dram_capacity_bytes, scene.figures.ssd_capacity_bytes) == (128, 8192)
    scene.put("w", 1, 2)
    assert scene.places(1, 2) == [{("a", 0)}, {("a", 0)}], "disks are not the first choice"
    scene.put("w", 3, media=[m.Medium.SSD])
    found = scene.lookup("r", 3)
    assert found.nodes == [m.NodeAddress("a", "a:1", 1, m.Medium.SSD)]
    assert found.offsets[0] in (4096, 8192), "from the segment's start, whole blocks of the disk"
    assert scene.figures.committed_bytes == 2 * BLOCK + 4096
    assert scene.put("w", 4, media=[m.Medium.CXL]) == ["no_space"]
    assert scene.register("a", blocks=2, segment=1).adopted == 0, "the reply was lost"
    scene.step(m.Leave("a"))
    assert scene.figures.capacity_bytes == scene.figures.copies == 0
    only_disk = Scene()
    only_disk.register("d", blocks=64, medium=m.Medium.SSD)
    assert only_disk.put("w", 1) == ["granted"], "where there is nothing else"


def test_checksums_may_be_told_with_the_commit():
    scene = Scene("a", "b")
    scene.put("w", 1, checksum=11)
    request = m.Allocate("w", 9, [key(1), key(2), key(3)], [BLOCK] * 3, replicas=2)
    granted = scene.step(request)
    assert granted.outcomes == ["exists", "granted", "granted"]
    assert granted.checksums == [11, 0, 0], "for the writer to compare"
    rows = [2, 3, 4]
    for wrong in ([], [5, 5], [5, 5, -1], [5, 5, 6, 6]):
        reason = scene.refused(m.Finish("w", 9, rows, checksums=wrong))
        assert reason is m.RefusalReason.MALFORMED
    done = scene.step(m.Finish("w", 9, rows, aborted=[5], checksums=[5, 5, 6]))
    assert done.stored == [True] * 3
    assert scene.lookup("r", 1, 2, 3).checksums == [11, 5, 6]
    assert [len(places) for places in scene.places(2, 3)] == [2, 1]
    assert scene.step(m.Finish("w", 9, rows, checksums=[5, 5, 6])).stored == [False] * 3
    again = scene.allocate("w", 2, checksum=6)
    assert again.outcomes == ["conflict"]
    assert again.checksums == []
    told = scene.allocate("w", 4)
    assert told.outcomes == ["granted"]
    late = m.Finish("w", scene.batch, [0], checksums=[7])
    assert scene.refused(late) is m.RefusalReason.MALFORMED, "they were told before"
    pinned = m.Allocate("w", 99, [key(2)], [BLOCK], pin=m.Pin.SOFT)
    assert scene.refused(pinned) is m.RefusalReason.MALFORMED


def test_copies_with_other_checksums_are_not_of_one_block():
    scene = Scene("a", "b")
    granted = scene.step(m.Allocate("w", 1, [key(1)], [BLOCK], replicas=2))
    assert granted.outcomes == ["granted"]
    assert scene.step(m.Finish("w", 1, [0, 1], checksums=[5, 6])).stored.count(True) == 1
    assert scene.lookup("r", 1).checksums in ([5], [6])
    assert [len(places) for places in scene.places(1)] == [1]


def test_a_segments_blocks_are_told_in_pieces():
    scene = Scene()
    pieces = [m.HeldBlocks([key(i)], [64 * i], [64], [7]) for i in (3, 0, 2)]
    assert scene.register("a", untouched=False, held=pieces[0], more=True).adopted == 1
    assert scene.there(3) == [3], "what is told can be read"
    assert scene.put("w", 9) == ["no_space"]
    assert scene.step(m.Hold("a", 0, pieces[1], True)).adopted == 1
    assert scene.step(m.Hold("a", 0, pieces[1], True)).adopted == 0
    scene.step(m.Remove([key(0)]))
    assert scene.refused(m.Hold("a", 1, pieces[2])) is m.RefusalReason.UNKNOWN_NODE
    assert scene.step(m.Hold("a", 0, pieces[2])).adopted == 1
    assert scene.step(m.Hold("a", 0, pieces[1])).adopted == 0, "all was told"
    scene.pass_time(31, "a")
    assert scene.put("w", 9) == ["granted"]
    assert scene.figures.free_bytes == 5 * BLOCK


def test_held_blocks_bring_pins_tables_tenants_and_groups():
    held = m.HeldBlocks(
        keys=[key(1), key(2)],
        offsets=[0, 128],
        lengths=[100, 64],
        checksums=[1, (1 << 64) - 1],
        pinned=[True, False],
        chunk_bytes=[50, 0],
        tenants=["t", ""],
        groups=["g", ""],
    )
    scene = Scene()
    assert scene.register("a", untouched=False, held=held).adopted == 2
    found = scene.lookup("r", 1, 2)
    assert (found.lengths, found.chunk_bytes) == ([100, 64], [50, 0])
    assert found.checksums == held.checksums
    assert scene.figures.hard_pinned_blocks == 1
    (tenant,) = [t for t in scene.step(m.ListTenants()).tenants if t.tenant == "t"]
    assert (tenant.used_bytes, tenant.blocks) == (128, 1), "payload, table of two, padding"


def test_replicas_lie_in_distinct_domains_and_fewer_are_fine():
    scene = Scene()
    for node, domain in (("a", "rack1"), ("b", "rack1"), ("c", "rack2"), ("d", "")):
        scene.register(node, domain=domain)
    reply = scene.allocate("w", 1, 2, replicas=4)
    assert reply.outcomes == [m.PutOutcome.GRANTED] * 2
    assert len(reply.node_idx) == 8
    for position in range(2):
        granted = [i for i in reply.node_idx[4 * position : 4 * position + 4] if i >= 0]
        nodes = {reply.nodes[i].node for i in granted}
        assert len(granted) == 3
        assert nodes in ({"a", "c", "d"}, {"b", "c", "d"})
    assert scene.finish("w", committed=[1], aborted=[0]).stored == [True], "any copy makes it"
    assert scene.allocate("v", 1).outcomes == [m.PutOutcome.EXISTS]
    assert scene.allocate("v", 2).outcomes == [m.PutOutcome.IN_PROGRESS]
    scene.finish("w", batch=1, committed=[2, 4, 5, 6])
    assert scene.figures.copies == 5
    assert scene.figures.blocks == scene.figures.stored_blocks == 2
    scene.step(m.Remove([key(1), key(2)]))
    assert scene.figures.committed_bytes == 0


def test_the_nearest_and_fastest_copy_is_read_and_equal_ones_in_turns():
    scene = Scene("a", "b", "c")
    scene.put("w", 1, replicas=2)
    first, second = (scene.lookup("r", 1).nodes[0].node for _ in range(2))
    assert {first, second} == {node for node, _ in scene.places(1)[0]}
    assert scene.lookup(first, 1).nodes[0].node == first
    assert scene.lookup(first, 1, avoid=[first]).nodes[0].node == second
    assert scene.lookup("r", 1, avoid=[first, second]).lease_id == 0
    report = m.ReportBad("r", [key(1)], [first], [0], [True], [0])
    assert scene.step(report).count == 1
    assert scene.lookup(first, 1).nodes[0].node == second


def test_preferred_nodes_come_first_and_the_own_domain_last():
    scene = Scene()
    for node, domain in (("w", "r1"), ("near", "r1"), ("far", "r2"), ("other", "r3")):
        scene.register(node, blocks=2, domain=domain)
    assert scene.put("w", 1, prefer=["near"]) == ["granted"]
    assert scene.places(1) == [{("near", 0)}]
    scene.put("w", 2, 3, 4, 5, pin=m.Pin.HARD)
    assert {node for where in scene.places(2, 3, 4, 5) for node, _ in where} == {"far", "other"}
    scene.put("w", 6)
    assert scene.places(6) == [{("near", 0)}]
    scene.put("w", 7, prefer=["w"])
    assert scene.places(7) == [{("w", 0)}]


def test_every_key_that_is_there():
    scene = Scene("n")
    scene.put("w", 1, 3, chunk_bytes=10)
    found = scene.lookup("r", 1, 2, 3, every=True)
    assert found.node_idx == [0, -1, 0]
    assert found.chunk_bytes == [10, 0, 10]
    assert found.lease_id > 0
    assert scene.lookup("r", 1, 2, 3).node_idx == [0]
    missing = scene.lookup("r", 8, 9, every=True)
    assert (missing.lease_id, missing.node_idx) == (0, [-1, -1])
    assert scene.figures.hit_blocks == 3


def test_the_space_of_a_block_includes_its_part_table():
    scene = Scene("n", blocks=4)
    assert scene.put("w", 1, length=128, chunk_bytes=64) == ["granted"]
    assert scene.figures.committed_bytes == 192
    assert scene.put("w", 1, length=128) == ["conflict"]
    assert scene.put("w", 2, length=4 * BLOCK, chunk_bytes=64) == ["too_large"]
    assert scene.put("w", 2, length=4 * BLOCK) == ["granted"]


def test_leases_are_renewed_by_who_holds_them():
    scene = Scene("n", blocks=1)
    scene.put("w", 1)
    lease = scene.lookup("r", 1).lease_id
    scene.pass_time(8, "n")
    renewed = scene.step(m.Renew("r", [lease, 99]))
    assert renewed.running == [True, False]
    assert scene.step(m.Renew("thief", [lease])).running == [False]
    scene.pass_time(8, "n")
    reply = scene.allocate("w", 2)
    assert reply.outcomes == [m.PutOutcome.NO_SPACE]
    assert 0 < reply.retry_s <= 1.0
    scene.pass_time(2, "n")
    assert scene.step(m.Renew("r", [lease])).running == [False]
    assert scene.put("w", 2) == ["granted"]


@pytest.mark.parametrize("pause_s", [4.0, 8.9, 1000.0])
def test_a_master_that_slept_ends_no_lease_and_no_put_for_it(pause_s):
    scene = Scene("n", blocks=2)
    scene.put("w", 1)
    lease = scene.lookup("r", 1).lease_id
    scene.allocate("w", 2)
    scene.pass_time(9, "n")
    scene.now += pause_s
    assert scene.step(m.Renew("r", [lease])).running == [True]
    assert scene.there(1) == [1], "its node is not silent"
    assert scene.finish("w", committed=[0]).stored == [True]
    scene.pass_time(10.1, "n")
    assert scene.step(m.Renew("r", [lease])).running == [False], "awake, it counts on"


def test_soft_pins_go_last_and_end_by_themselves():
    scene = Scene("n", blocks=3)
    scene.put("w", 1, pin=m.Pin.SOFT, pin_s=20.0)
    scene.put("w", 2, 3)
    scene.put("w", 4, 5)
    assert scene.there(1, 2, 3) == [1]
    assert scene.put("w", 6, length=3 * BLOCK) == ["granted"], "nothing else is left"
    assert scene.there(1) == []
    scene.step(m.Remove([key(6)]))
    scene.put("w", 1, pin=m.Pin.SOFT, pin_s=5.0)
    assert scene.figures.soft_pinned_blocks == 1
    scene.put("w", 2, 3)
    scene.pass_time(6, "n")
    assert scene.figures.soft_pinned_blocks == 0
    scene.lookup("r", 2, 3)
    scene.put("w", 4)
    assert scene.there(1, 2, 3) == [2, 3]


def test_the_stronger_pin_counts_until_it_is_set():
    scene = Scene("n", blocks=2)
    scene.put("w", 1, pin=m.Pin.SOFT, pin_s=100.0)
    scene.put("v", 1, pin=m.Pin.SOFT, pin_s=1.0)
    scene.pass_time(2, "n")
    assert scene.figures.soft_pinned_blocks == 1, "the longer one"
    scene.put("v", 1, pin=m.Pin.HARD)
    scene.put("v", 1, pin=m.Pin.SOFT)
    assert (scene.figures.soft_pinned_blocks, scene.figures.hard_pinned_blocks) == (0, 1)
    assert scene.put("w", 2, length=2 * BLOCK) == ["no_space"]
    assert scene.step(m.SetPin("w", [key(1), key(9)], m.Pin.NONE)).count == 1
    assert scene.put("w", 2, length=2 * BLOCK) == ["granted"]


def test_soft_pinned_blocks_that_are_read_stay():
    scene = Scene("n", blocks=2)
    scene.put("w", 1, 2, pin=m.Pin.SOFT)
    scene.lookup("r", 1)
    assert scene.put("w", 3) == ["granted"]
    assert scene.there(1, 2, 3) == [1, 3]
    scene.step(m.SetPin("w", [key(1)], m.Pin.NONE))
    scene.step(m.SetPin("w", [key(1)], m.Pin.HARD))
    scene.step(m.SetPin("w", [key(1)], m.Pin.SOFT, 3.0))
    scene.pass_time(11, "n")
    assert scene.put("w", 4, 5) == ["granted", "granted"]


def test_groups_are_evicted_pinned_and_removed_together():
    scene = Scene("n", blocks=6)
    scene.put("w", 1, 2, 3, group="g")
    scene.put("w", 4, 5, 6)
    scene.put("w", 7)
    assert scene.there(*range(1, 8)) == [4, 5, 6, 7], "a group is of no use without one of it"
    scene.put("w", 1, 2, group="g")
    assert scene.step(m.SetPin("w", [], m.Pin.HARD, group="g")).count == 2
    scene.put("w", 11, 12, 13, 14)
    assert scene.there(1, 2) == [1, 2]
    assert scene.step(m.Remove([key(11)], "w", "g")).count == 3
    assert scene.there(1, 2, 11, 12) == [12]
    assert scene.step(m.Remove([], "w", "g")).count == 0


def test_what_of_a_group_is_read_or_pinned_stays():
    scene = Scene("n", blocks=3)
    scene.put("w", 1, 2, 3, group="g")
    scene.lookup("r", 2)
    scene.step(m.SetPin("w", [key(3)], m.Pin.HARD))
    scene.put("w", 4)
    assert scene.there(1, 2, 3, 4) == [2, 3, 4]


def test_planned_copies_are_opened_committed_and_given_up():
    scene = Scene("a", "b", blocks=2)
    scene.put("b", 1, prefer=["a"])
    catalog = scene.catalog
    (row,) = catalog.copies(key(1))
    target = catalog.pool.find("b", 0)
    first = catalog.planned.open(row, target, scene.now)
    second = catalog.planned.open(row, target, scene.now)
    assert catalog.planned.open(row, target, scene.now) is None, "no room"
    assert catalog.planned.open(row, catalog.pool.of(row), scene.now) is None
    scene.step(m.Observe())
    assert scene.put("w", 2, 3, prefer=["a"]) == ["granted", "no_space"], "the source stays"
    assert catalog.planned.commit(first, scene.now)
    assert scene.places(1) == [{("a", 0), ("b", 0)}]
    assert not catalog.planned.commit(second, scene.now), "one per segment"
    assert not catalog.planned.commit(second, scene.now)
    scene.step(m.Observe())
    assert scene.figures.stored_blocks == 2, "a further copy is no further block"
    catalog.drop(row)
    assert scene.lookup("r", 1).nodes[0].node == "b"


def test_planned_copies_of_nodes_that_end():
    scene = Scene("a", "b", "c", blocks=4)
    scene.put("b", 1, 2, 3, prefer=["a"])
    catalog = scene.catalog

    def order(i, node="b"):
        (row, *_) = catalog.copies(key(i))
        return catalog.planned.open(row, catalog.pool.find(node, 0), scene.now)

    lost = order(1, "c")
    scene.step(m.Leave("c"))
    assert not catalog.planned.commit(lost, scene.now), "its segment went"
    unsure, late, given_up = order(1), order(2), order(3)
    catalog.planned.abort(given_up, at_rest=True)
    catalog.planned.abort(unsure, at_rest=False)
    scene.step(m.Observe())
    assert scene.figures.quarantined_bytes == BLOCK
    catalog.planned.abort(unsure, at_rest=True)
    catalog.planned.abort(unsure, at_rest=True)
    assert scene.figures.quarantined_bytes == 0
    scene.pass_time(31, "a", "b")
    assert scene.figures.quarantined_bytes == BLOCK, "too slow"
    assert not catalog.planned.commit(late, scene.now)
    assert scene.figures.quarantined_bytes == 0
    fenced = order(3)
    scene.step(m.Fence(["a"], dead=False))
    assert scene.figures.quarantined_bytes == BLOCK
    assert scene.there(1, 2, 3) == []
    assert scene.step(m.Fence(["a"], dead=True)).count == 1
    assert not catalog.planned.commit(fenced, scene.now)
    assert scene.figures.free_bytes == scene.figures.capacity_bytes


def test_observers_are_told():
    told = []

    class Observer:
        def __getattr__(self, name):
            return lambda what: told.append(name)

    scene = Scene()
    scene.catalog.observers.append(Observer())
    scene.register("n", blocks=1)
    scene.put("w", 1)
    scene.step(m.Release("r", [scene.lookup("r", 1).lease_id]))
    scene.put("w", 2)
    scene.step(m.Leave("n"))
    assert told == ["joined", "stored", "hit", "evicted", "stored", "dropped", "left"]


def test_requests_that_make_no_sense_change_nothing():
    scene = Scene("n", tenants=[TenantRule(name="t", token="s")])
    scene.step(m.Enter("w", "t", "s"))
    one = ([key(1)], [64], [0])
    for request in (
        m.Allocate("w", -1, *one),
        m.Allocate("w", 1, [key(1)], [64], [-1]),
        m.Allocate("w", 1, *one, chunk_bytes=1 << 40),
        m.Register("o", "o:1", 64, True, m.HeldBlocks(), base=7),
        m.Register("o", "o:1", 64, True, m.HeldBlocks([key(1)], [0], [64], [-5])),
        m.Register("o", "o:1", 64, True, m.HeldBlocks([key(1)], [0], [64], [0], [], [1 << 33])),
        m.ReportBad("w", [key(1)], ["n"], [0], [True], [0, 1]),
    ):
        assert scene.refused(request) is m.RefusalReason.MALFORMED, request
    held = m.HeldBlocks([key(1), key(2), key(3)], [-64, 0, 64], [64, -3, 1 << 62], [0, 0, 0])
    assert scene.register("p", held=held).adopted == 0
    assert scene.put("w", 5, length=1 << 62) == ["too_large"]
    empty = scene.step(m.Lookup("w", []))
    assert (empty.lease_id, empty.offsets) == (0, [])
    assert scene.step(m.Remove([], "w", "nothing")).count == 0
    assert math.isfinite(scene.step(m.Allocate("w", 3, [], [], [])).put_s)
    assert MasterTiming().soft_pin_s > 0
