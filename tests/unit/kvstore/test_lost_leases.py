"""Leases that a master renews no more: of memory that came back, and of another master."""

from __future__ import annotations

from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.wire import messages as m
from tests.support.master_scene import BLOCK, Scene, key


def renew(scene: Scene, client: str, *lease_ids: int) -> list[bool]:
    return scene.step(m.Renew(client, list(lease_ids))).running


def test_what_came_back_is_leased_by_nobody_who_had_it_before():
    scene = Scene("a")
    assert scene.put("writer", 1) == ["granted"]
    found = scene.lookup("reader", 1)
    other = scene.lookup("reader", 1)
    while scene.catalog.pool.node("a") is not None:  # silent for longer than it may be
        scene.now += 1.0
        assert renew(scene, "reader", found.lease_id) == [True], "its memory is as it was"
    held = m.HeldBlocks([key(1)], found.offsets, found.lengths, found.checksums)
    scene.register("a", untouched=False, held=held)
    assert scene.there(1) == [1]
    assert renew(scene, "reader", found.lease_id, other.lease_id) == [False, False]
    # For as long as its reader may think that it has it, what came back stays.
    assert scene.allocate("writer", *range(10, 18), length=BLOCK).node_idx.count(-1) >= 1
    scene.pass_time(11.0, "a")
    assert scene.figures.leases == 0
    anew = scene.lookup("reader", 1)
    assert renew(scene, "reader", anew.lease_id) == [True]


def test_a_node_that_lends_for_the_first_time_ends_no_lease():
    scene = Scene("a")
    scene.put("writer", 1)
    found = scene.lookup("reader", 1)
    scene.step(m.Leave("a"))
    scene.register("b")
    assert renew(scene, "reader", found.lease_id) == [True]


def test_leases_of_two_masters_have_no_number_in_common():
    ids = []
    for last in (5, 1 << 59):
        master = StoreMaster(MasterTiming(), last_lease_id=last)
        master.step(m.Register("a", "a:1", 640, True, m.HeldBlocks()), 0.0)
        reply = master.step(m.Allocate("w", 1, [key(1)], [64], [7]), 0.0)
        assert reply.node_idx == [0]
        master.step(m.Finish("w", 1, [0]), 0.0)
        found = m.decode_reply(m.encode(master.step(m.Lookup("r", [key(1)], [], True), 0.0)))
        ids.append(found.lease_id)
    assert ids == [6, (1 << 59) + 1]
