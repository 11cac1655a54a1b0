"""Pins that are set after the put: nodes hear of them, for the sake of the next master."""

from __future__ import annotations

import secrets

from kvstore import Pin, PutOptions
from kvstore.master.books import untold_pins
from kvstore.node.heard_pins import HeardPins
from kvstore.wire import messages as m
from tests.support.master_scene import Scene, key
from tests.support.store_pool import Pool
from tests.support.waits import eventually


def beat(scene: Scene, node: str, *heard: int) -> m.PinChanges | None:
    reply = scene.step(m.Heartbeat(node, list(heard)))
    assert reply.known
    return reply.pins


def told(changes: m.PinChanges) -> dict[bytes, bool]:
    return dict(zip(changes.keys, changes.hard, strict=True))


def test_a_node_is_told_until_it_has_heard():
    scene = Scene("n", "other")
    scene.put("w", *range(4))
    assert beat(scene, "n") is beat(scene, "other") is None
    scene.step(m.SetPin("w", [key(0), key(1)], Pin.HARD))
    first = [beat(scene, "n"), beat(scene, "other")]
    again = [beat(scene, "n"), beat(scene, "other")]
    for changes in (first, again):
        assert told(changes[0] or changes[1]) == {key(0): True, key(1): True}
    node = "n" if again[0] else "other"
    number = (again[0] or again[1]).number
    assert beat(scene, node, first[node == "other"].number, number) is None
    scene.step(m.SetPin("w", [key(0)], Pin.NONE))
    scene.step(m.SetPin("w", [key(2)], Pin.SOFT))  # which ends by itself, with its master if not so
    changes = beat(scene, node, number)
    assert told(changes) == {key(0): False}
    scene.step(m.SetPin("w", [key(3)], Pin.HARD))  # while that is under way
    assert told(beat(scene, node)) == {key(0): False, key(3): True}


def test_who_puts_a_block_that_is_there_with_a_pin():
    scene = Scene("n")
    scene.put("w", 1, checksum=5)
    assert scene.put("w", 1, checksum=5, pin=Pin.HARD) == ["exists"]
    assert told(beat(scene, "n")) == {key(1): True}


def test_more_than_one_reply_takes(monkeypatch):
    monkeypatch.setattr(untold_pins, "AT_ONCE_MAX", 3)
    scene = Scene("n")
    scene.put("w", *range(8))
    scene.step(m.SetPin("w", [key(i) for i in range(8)], Pin.HARD))
    scene.step(m.Remove([key(0)], "w"))
    found: dict[bytes, bool] = {}
    number = 0
    while (changes := beat(scene, "n", number)) is not None:
        found |= told(changes)
        number = changes.number
    assert found == {key(i): True for i in range(1, 8)}


def test_a_node_that_is_gone_is_forgotten():
    scene = Scene("n")
    scene.put("w", 1)
    scene.step(m.SetPin("w", [key(1)], Pin.HARD))
    scene.step(m.Leave("n"))
    assert scene.catalog.pins.untold._nodes == {}


def test_pins_that_make_no_sense(caplog):
    heard = HeardPins()
    heard.heed(m.PinChanges(7, [3, -1], [0, 0], [key(1), key(2)], [True, True]))
    assert heard.numbers == [7]
    assert caplog.text.count("which there is not") == 2


def test_a_node_knows_of_pins(stack):
    pool = Pool(stack, heartbeat_s=0.05)
    (segment,) = pool.nodes[0].segments
    names = [secrets.token_hex(8) for _ in range(3)]
    for name, pin in zip(names, (Pin.NONE, Pin.NONE, Pin.HARD), strict=True):
        options = PutOptions(pin=pin)
        assert pool.store.put(name, secrets.token_bytes(5000), options=options) == "stored"
    blocks = {block.offset: block for block in segment.index.blocks()}
    before = {offset: block.pinned for offset, block in blocks.items()}
    assert sorted(before.values()) == [False, False, True]
    assert pool.store.set_pin(names[:1], Pin.HARD) == 1
    assert pool.store.set_pin(names[2:], Pin.NONE) == 1
    eventually(lambda: [b.pinned for b in segment.index.blocks()] != list(before.values()))
    changed = [b for b in segment.index.blocks() if b.pinned != before[b.offset]]
    assert len(changed) == 2
    somewhere = changed[0].offset
    segment.set_pinned(somewhere, secrets.token_bytes(16), pinned=not changed[0].pinned)
    assert segment.index.at(somewhere).pinned == changed[0].pinned != before[somewhere]
