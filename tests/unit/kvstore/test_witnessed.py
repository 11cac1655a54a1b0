"""What a node proves to be written by nobody any more is free, and nothing besides."""

from __future__ import annotations

from kvstore.wire import messages as m
from tests.support.master_scene import BLOCK, Scene

PUT_S = 30.0


def there(scene, node, writers=(), *, dead=False, segments=(0,)):
    return scene.step(m.WritersAt(node, list(segments), list(writers), dead))


def over(scene, node, writer, batches, *, dead, segments=(0,)):
    return scene.step(m.WritesOver(node, list(segments), writer, batches, dead)).count


def bytes_under_way(scene):
    return scene.figures.open_bytes + scene.figures.quarantined_bytes


def test_of_the_dead_all_of_that_segment_is_free_and_no_other():
    scene = Scene("a", "b", blocks=4)
    scene.allocate("w", 1, 2, replicas=2)
    put = scene.batch
    scene.step(m.Reserve("w", bytes(16), batch=93, nbytes=BLOCK))
    scene.step(m.Reserve("w", bytes(16), batch=94, nbytes=BLOCK))
    scene.allocate("v", 5)
    held = bytes_under_way(scene)
    assert there(scene, "a").writers == [], "nothing is late"
    free = 0
    for node in "ab":
        (batches,) = there(scene, node, ["w"], dead=True).batches
        assert put in batches
        assert over(scene, node, "w", batches, dead=True, segments=[1]) == 0
        free += over(scene, node, "w", batches, dead=True)
        assert there(scene, node, ["w"], dead=True).batches == [[]]
        assert over(scene, node, "w", batches, dead=True) == 0, "asked twice"
    assert held - free * BLOCK == bytes_under_way(scene) == BLOCK, "what another one has"
    assert scene.finish("w", batch=put, committed=[0, 1]).stored == [False, False]


def test_of_who_may_come_back_only_what_is_late():
    scene = Scene("a")
    scene.allocate("w", 1)
    late = scene.batch
    scene.pass_time(2 * PUT_S - 5, "a")
    scene.allocate("w", 2)
    young = scene.batch
    assert there(scene, "a").writers == []
    assert over(scene, "a", "w", [late, young], dead=False) == 0
    scene.pass_time(5, "a")
    assert there(scene, "a").writers == ["w"]
    assert there(scene, "a", ["w", "x"]).batches == [[late], []]
    assert over(scene, "a", "w", [late, young], dead=False) == 1
    assert bytes_under_way(scene) == BLOCK


def test_a_request_that_comes_once_more_is_granted_nothing():
    scene = Scene("a")
    request = m.Allocate("w", 7, [bytes(16)], [BLOCK], [7])
    scene.step(request)
    assert over(scene, "a", "w", [7], dead=True) == 1
    assert scene.refused(request) is m.RefusalReason.MALFORMED
    assert bytes_under_way(scene) == 0


def test_copies_are_not_meant_and_unknown_nodes_know_nothing():
    scene = Scene("a", "b")
    scene.put("w", 1)
    (place,) = scene.places(1)
    ((source, _),) = place
    scene.step(m.Drain(source))
    scene.pass_time(1.0, "a", "b")
    scene.step(m.NextCopies(source))
    assert bytes_under_way(scene) == BLOCK, "a copy has to be under way"
    target = "b" if source == "a" else "a"
    assert there(scene, target, [source], dead=True).batches == [[]]
    assert over(scene, target, source, [-1], dead=True) == 0
    assert there(scene, "elsewhere", ["w"], dead=True).batches == [[]]
