"""Transitions of the master, one at a time, on a clock that the test moves."""

from __future__ import annotations

import pytest

from configs.schema import Eviction
from kvstore.errors import InvariantViolated
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.wire import messages as m

TIMING = MasterTiming(lease_s=10.0, silence_s=9.0, put_s=30.0)
BLOCK = 64


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


class Scene:
    """A master, its clock, and short ways to ask."""

    def __init__(
        self,
        *nodes: str,
        blocks: int = 8,
        timing: MasterTiming = TIMING,
        eviction: Eviction = Eviction.LRU,
    ) -> None:
        self.master, self.now, self.batch = StoreMaster(timing, eviction=eviction), 0.0, 0
        for node in nodes:
            self.register(node, blocks=blocks)

    def step(self, request: m.Request) -> m.Reply:
        reply = self.master.step(request, self.now)
        self.master.check_invariants()
        return reply

    def register(self, node, *, blocks=8, untouched=True, held=None):
        held = held or m.HeldBlocks()
        return self.step(m.Register(node, f"{node}:1", blocks * BLOCK, untouched, held))

    def pass_time(self, seconds: float, *speaking: str) -> None:
        """Let time pass in steps that the master is awake for."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.step(m.Observe())
            for node in speaking:
                self.step(m.Heartbeat(node))

    def allocate(self, client, *ids, length=BLOCK, checksum=7, pin=False, **more):
        self.batch += 1
        keys = [key(i) for i in ids]
        n = len(ids)
        reply = self.step(
            m.Allocate(
                client=client,
                batch=self.batch,
                keys=keys,
                lengths=[length] * n,
                checksums=[checksum] * n,
                pin=m.Pin.HARD if pin else m.Pin.NONE,
                **more,
            )
        )
        assert isinstance(reply, m.Allocated), reply
        return reply

    def finish(self, client, *, batch=None, **columns):
        batch = batch or self.batch
        return self.step(m.Finish(client, batch, columns.pop("committed", []), **columns))

    def put(self, client, *ids, **options):
        reply = self.allocate(client, *ids, **options)
        granted = [i for i, o in enumerate(reply.outcomes) if o is m.PutOutcome.GRANTED]
        if granted:
            assert all(self.finish(client, committed=granted).stored)
        return [str(outcome) for outcome in reply.outcomes]

    def lookup(self, client, *ids, avoid=()):
        return self.step(m.Lookup(client, [key(i) for i in ids], list(avoid)))

    def there(self, *ids):
        flags = self.step(m.Exists([key(i) for i in ids])).flags
        return [i for i, flag in zip(ids, flags, strict=True) if flag]

    @property
    def figures(self) -> m.MasterStatistics:
        return self.master.statistics()


def test_put_lookup_remove():
    scene = Scene("a", "b")
    assert scene.put("a", 1, 2, 3) == ["granted"] * 3
    found = scene.lookup("b", 1, 2, 9, 3)
    assert len(found.offsets) == 2
    assert found.nodes == [m.NodeAddress("b", "b:1")]
    assert found.checksums == [7, 7]
    scene.step(m.Release("b", [found.lease_id]))
    assert scene.step(m.Remove([key(1), key(9)])).count == 1
    assert scene.there(1, 2, 3) == [2, 3]
    assert scene.lookup("b", 9).lease_id == 0
    assert scene.figures.committed_bytes == 2 * BLOCK


def test_the_first_bytes_of_a_key_stay():
    scene = Scene("a", "b")
    scene.put("a", 1)
    assert scene.put("b", 1) == ["exists"]
    assert scene.put("b", 1, checksum=8) == ["conflict"]
    assert scene.put("b", 1, length=BLOCK - 1) == ["conflict"]
    scene.allocate("a", 2)
    assert scene.put("b", 2, 2, 3, 3) == ["in_progress", "in_progress", "granted", "in_progress"]


def test_blocks_go_to_other_nodes_than_their_writer():
    scene = Scene("a", "b", "c", blocks=4)
    scene.put("a", *range(8))
    assert {n.node for n in scene.lookup("x", *range(8)).nodes} == {"b", "c"}
    # An old block elsewhere goes before free space at home is used.
    scene.pass_time(11, "a", "b", "c")
    scene.put("a", 100)
    assert scene.lookup("x", 100).nodes[0].node in {"b", "c"}
    assert scene.figures.evicted_blocks == 1
    # All of it leased: home is better than nowhere.
    scene.lookup("x", *scene_ids(scene))
    scene.put("a", 101)
    assert scene.lookup("x", 101).nodes == [m.NodeAddress("a", "a:1")]
    alone = Scene("a")
    assert alone.put("a", 1) == ["granted"]


def scene_ids(scene):
    return scene.there(*range(8), 100)


def test_eviction_takes_the_least_used_and_the_leaf_before_the_root():
    scene = Scene("n", blocks=6)
    scene.put("w", 1, 2, 3)  # one chain
    scene.put("w", 11, 12, 13)  # another
    found = scene.lookup("w", 1, 2, 3)  # the first is the younger now
    scene.step(m.Release("w", [found.lease_id]))
    scene.put("w", 21)
    assert scene.there(1, 2, 3, 11, 12, 13) == [1, 2, 3, 11, 12]
    scene.put("w", 22, 23, 24)
    assert scene.there(1, 2, 3, 11, 12, 13, 21) == [1, 2, 21]


def test_a_prefix_outlives_what_was_stored_behind_it_later():
    """Whoever looks up a chain, misses its end and stores that tells the order of its blocks."""
    for eviction, left in ((Eviction.LRU, [4, 5]), (Eviction.PREFIX_AWARE, [1, 2])):
        scene = Scene("n", blocks=6, eviction=eviction)
        scene.lookup("w", 1, 2, 3)
        scene.put("w", 1, 2, 3)
        found = scene.lookup("w", 1, 2, 3, 4, 5)
        scene.step(m.Release("w", [found.lease_id]))
        scene.put("w", 4, 5)
        scene.put("w", 21, pin=True)
        scene.put("w", 22, 23, 24, pin=True)
        assert scene.there(1, 2, 3, 4, 5) == left, eviction


@pytest.mark.parametrize("eviction", Eviction)
def test_neither_pinned_nor_leased_blocks_are_evicted(eviction):
    scene = Scene("n", blocks=3, eviction=eviction)
    scene.put("w", 1, pin=True)
    scene.put("w", 2, 3)
    scene.put("v", 2, pin=True)  # pins what exists
    lease = scene.lookup("r", 3).lease_id
    assert scene.put("w", 4) == ["no_space"]
    assert scene.there(1, 2, 3) == [1, 2, 3], "evicting what is read would free nothing"
    scene.step(m.Release("stranger", [lease]))
    assert scene.put("w", 4) == ["no_space"]
    scene.step(m.Release("r", [lease]))
    assert scene.put("w", 4) == ["granted"]
    assert scene.there(1, 2, 3, 4) == [1, 2, 4]
    assert scene.put("w", 5, length=3 * BLOCK) == ["no_space"]
    assert scene.there(4) == [4], "nothing is evicted for what cannot fit"
    assert scene.figures.no_space_blocks == 3
    assert scene.put("w", 6, 7, length=99 * BLOCK) == ["too_large", "too_large"]
    figures = scene.figures
    assert (figures.no_space_blocks, figures.too_large_blocks, figures.over_quota_blocks) == (
        3,
        2,
        0,
    )


def test_a_lease_keeps_removed_bytes_until_it_ends():
    scene = Scene("n", blocks=1)
    scene.put("w", 1)
    scene.lookup("r", 1)
    scene.step(m.Remove([key(1)]))
    assert scene.figures.retired_bytes == BLOCK
    assert scene.put("w", 2) == ["no_space"]
    scene.pass_time(9.9, "n")
    assert scene.put("w", 2) == ["no_space"]
    scene.pass_time(0.1, "n")
    assert scene.put("w", 2) == ["granted"]


def test_fenced_writers_bytes_are_quarantined_until_it_is_dead():
    scene = Scene("a", "b", blocks=2)
    scene.allocate("w", 1, 2)
    scene.step(m.Fence(["w"], dead=False))
    assert scene.figures.quarantined_bytes == 2 * BLOCK
    assert scene.put("v", 1, 2, 3) == ["granted", "granted", "no_space"], "the keys are free"
    late = scene.finish("w", batch=1, committed=[0])
    assert isinstance(late, m.Refused)
    assert late.reason is m.RefusalReason.FENCED
    scene.pass_time(1000, "a", "b")
    assert scene.figures.quarantined_bytes == 2 * BLOCK, "time alone proves nothing"
    assert scene.step(m.Fence(["w"], dead=True)).count == 2
    assert scene.figures.quarantined_bytes == 0


def test_a_slow_put_loses_its_key_and_its_commit_frees_the_bytes():
    scene = Scene("n")
    scene.allocate("w", 1)
    scene.pass_time(30.5, "n")
    assert scene.figures.quarantined_bytes == BLOCK
    assert scene.put("v", 1) == ["granted"]
    assert scene.finish("w", batch=1, committed=[0]).stored == [False]
    assert scene.figures.quarantined_bytes == 0
    assert scene.there(1) == [1]


def test_ways_a_put_can_end():
    scene = Scene("n")
    scene.allocate("w", 1, 2, 3, 4)
    assert scene.finish("w", committed=[0], aborted=[1], unsettled=[2, 17]).stored == [True]
    figures = scene.figures
    assert (figures.committed_bytes, figures.open_bytes, figures.quarantined_bytes) == (64, 64, 64)
    assert scene.finish("w", committed=[0]).stored == [False], "twice is once"
    assert scene.put("v", 2, 3) == ["granted", "granted"]
    scene.finish("w", batch=1, aborted=[2])  # it found out that nothing is under way
    assert scene.figures.quarantined_bytes == 0


def test_a_lost_reply_loses_no_space():
    scene = Scene("n")
    first = scene.allocate("w", 1, 2)
    scene.batch -= 1
    assert scene.allocate("w", 1, 2) == first
    assert scene.allocate("w", 3, abandoned=[1]).outcomes == [m.PutOutcome.GRANTED]
    assert scene.figures.open_bytes == BLOCK
    late = scene.step(m.Allocate("w", 1, [key(5)], [BLOCK], [0]))
    assert isinstance(late, m.Refused), "an abandoned request that comes late opens nothing"


def test_a_node_takes_only_its_own_copies():
    scene = Scene("a", "b")
    scene.put("a", 1)  # on b
    scene.put("b", 2)  # on a
    scene.allocate("a", 3)
    scene.lookup("r", 1, 2)
    scene.step(m.Fence(["b"], dead=False))
    assert scene.there(1, 2, 3) == [2]
    assert scene.finish("a", committed=[0]).stored == [False]
    refused = scene.register("b")
    assert isinstance(refused, m.Refused)
    scene.step(m.Leave("a"))
    assert scene.figures.capacity_bytes == 0


def test_silent_nodes_are_dropped_unless_it_was_the_master_who_slept():
    scene = Scene("a", "b")
    scene.put("a", 1)
    scene.now += 1000.0
    assert scene.there(1) == [1]
    scene.pass_time(8.9, "a")
    assert scene.there(1) == [1]
    scene.pass_time(0.2, "a")
    assert scene.there(1) == []
    assert scene.step(m.Heartbeat("b")).known is False


def test_reports_drop_what_is_corrupt_and_spare_what_others_can_reach():
    scene = Scene("a", "b")
    scene.put("a", 1, 2)
    found = scene.lookup("r", 1, 2)

    def report(i, offset, *, corrupt):
        return scene.step(m.ReportBad("r", [key(i)], ["b"], [offset], [corrupt])).count

    assert report(1, found.offsets[1], corrupt=True) == 0, "not where that block is"
    assert report(1, found.offsets[0], corrupt=False) == 0
    assert report(1, found.offsets[0], corrupt=True) == 1
    assert scene.there(1, 2) == [2]
    scene.pass_time(3.5, "a")
    assert report(2, found.offsets[1], corrupt=False) == 0
    assert scene.there(1, 2) == [], "nobody hears that node"
    assert scene.lookup("r", 2, avoid=["b"]).offsets == []


@pytest.mark.parametrize("how", ["heard", "asked for work", "silent", "slept", "left"])
def test_who_is_out_of_reach_and_silent_is_asked_for_nothing_until_it_speaks(how):
    scene = Scene("a", "b", "c")
    scene.put("a", 1, 2)
    found = scene.lookup("r", 1, 2)
    (node,) = {where.node for where in found.nodes}
    others = {"a", "b", "c"} - {node}
    blocks = scene.figures.blocks
    scene.pass_time(3.5, *others)
    report = m.ReportBad("r", [key(1)], [node], [found.offsets[0]], [False])
    assert scene.step(report).count == 0
    assert scene.lookup("r", 1, 2).offsets == [], "of all its blocks, none is looked for there"
    assert scene.there(1, 2) == []
    assert scene.figures.blocks == blocks
    assert scene.figures.unreachable_blocks == 1
    if how == "heard":
        assert scene.step(m.Heartbeat(node)).known
    elif how == "asked for work":
        assert scene.step(m.NextCopies(node)).copies == []
    elif how == "slept":
        scene.now += 1000.0
    elif how == "silent":
        scene.pass_time(7.0, *others)
    else:
        scene.step(m.Leave(node))
    back = how in ("heard", "asked for work", "slept")
    assert scene.there(1, 2) == ([1, 2] if back else [])
    assert len(scene.lookup("r", 1, 2).offsets) == (2 if back else 0)
    assert scene.figures.blocks == (blocks if back else 0)


def test_what_a_node_says_it_holds():
    held = m.HeldBlocks(
        keys=[key(1), key(2), key(3), key(1)],
        offsets=[0, 64, 100, 192],
        lengths=[64, 60, 64, 64],
        checksums=[7, 8, 9, 7],
        pinned=[False, True, False, False],
    )
    scene = Scene()
    assert scene.register("a", untouched=False, held=held).adopted == 2
    assert scene.there(1, 2, 3) == [1, 2]
    assert scene.register("a").adopted == 0
    assert scene.put("w", 4) == ["no_space"], "writers of the last master may not be done"
    scene.pass_time(31, "a")
    assert scene.put("w", 4) == ["granted"]
    copy = m.HeldBlocks([key(1), key(2)], [0, 64], [64, 60], [7, 9], [False, False])
    assert scene.register("b", held=copy).adopted == 1, "a second copy, and a contradiction"
    assert scene.lookup("b", 1).nodes[0].node == "b", "its own copy is the nearest"
    scene.step(m.Leave("b"))
    assert scene.there(1, 2) == [1, 2]


def test_malformed_requests_change_nothing():
    scene = Scene("n")
    for request in (
        m.Allocate("w", 1, [key(1)], [1, 2], [0]),
        m.ReportBad("w", [key(1)], [], [0], [True]),
        m.Register("o", "o:1", 64, True, m.HeldBlocks([key(1)], [], [], [], [])),
    ):
        reply = scene.step(request)
        assert isinstance(reply, m.Refused)
        assert reply.reason is m.RefusalReason.MALFORMED
    with pytest.raises(m.msgspec.ValidationError):
        m.decode_request(m.encode(m.Exists([b"short"])))
    with pytest.raises(m.msgspec.ValidationError):
        m.decode_request(m.encode(m.Allocate("w", 1, [key(1)], [0], [0])))


def test_books_that_do_not_balance_are_found():
    scene = Scene("n")
    scene.put("w", 1)
    scene.lookup("r", 1)
    table = scene.master._catalog.table
    table.leases[table.rows()[0]] = 0
    with pytest.raises(InvariantViolated, match="miscounted"):
        scene.master.check_invariants()


def test_writers_are_listed_until_they_are_done_or_dead():
    scene = Scene("a", "b", blocks=4)
    scene.put("done", 9)
    scene.allocate("w", 1, 2)
    scene.allocate("v", 3)
    rows = scene.step(m.ListWriters()).writers
    assert [(row.writer, row.open_bytes, row.quarantined_bytes) for row in rows] == [
        ("v", BLOCK, 0),
        ("w", 2 * BLOCK, 0),
    ]
    scene.step(m.Fence(["w"], dead=False))
    (row,) = [row for row in scene.step(m.ListWriters()).writers if row.writer == "w"]
    assert (row.open_bytes, row.quarantined_bytes) == (0, 2 * BLOCK)
    scene.step(m.Fence(["w"], dead=True))
    assert [row.writer for row in scene.step(m.ListWriters()).writers] == ["v"]
    assert scene.figures.quarantined_bytes == 0


@pytest.mark.parametrize(("heartbeat_s", "left"), [(0.0, 1), (1.0, 0)])
def test_short_leases_end_though_only_nodes_speak(heartbeat_s, left):
    """A pause from one heartbeat to the next is no sleep; a longer one is."""
    timing = MasterTiming(lease_s=2.0, silence_s=10.0, heartbeat_s=heartbeat_s)
    scene = Scene("a", "b", timing=timing)
    scene.put("a", 1)
    scene.lookup("r", 1)
    for _ in range(5):
        scene.now += 1.1
        scene.step(m.Heartbeat("a"))
    assert scene.figures.leases == left
    scene.lookup("r", 1)
    scene.now += 2.5
    scene.step(m.Heartbeat("a"))
    assert scene.figures.leases == left + 1, "it slept, and ends no lease for it"
