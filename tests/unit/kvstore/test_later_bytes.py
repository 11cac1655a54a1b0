"""A name that was removed and put again with other bytes: a new master takes the later ones."""

from __future__ import annotations

import itertools
import secrets
import time

import pytest

from kvstore.node import index_log
from kvstore.node.indexed_block import IndexedBlock
from kvstore.node.mailboxes import told_at
from kvstore.wire import messages as m
from kvstore.wire.messages import HeldBlocks
from kvstore.wire.peer_messages import Written, encode_to_node
from tests.support.master_scene import BLOCK, Scene, key
from tests.support.store_pool import Pool

FIRST, LATER = 11, 22  # checksums


def told(*blocks: tuple[int, int, int], pinned: bool = False) -> HeldBlocks:
    """Columns of blocks, each (key, checksum, stamp), one behind the other."""
    keys, checksums, stamps = map(list, zip(*blocks, strict=True))
    count = len(blocks)
    return HeldBlocks(
        list(map(key, keys)), [BLOCK * i for i in range(count)], [BLOCK] * count, checksums,
        [True] * count if pinned else [], stamps=stamps,
    )  # fmt: skip


def known(scene: Scene, number: int) -> set[int]:
    return {scene.catalog.table.checksum[row] for row in scene.catalog.copies(key(number))}


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_later_of_two_nodes_tales(order, pinned):
    scene = Scene()
    tales = [told((1, FIRST, 100), pinned=pinned), told((1, LATER, 200), pinned=pinned)]
    for node in order:
        scene.register(f"n{node}", untouched=False, held=tales[node])
    assert known(scene, 1) == {LATER}
    assert scene.figures.blocks == 1
    scene.pass_time(25.0, "n0", "n1")  # the leases that are respected unseen end
    assert scene.figures.committed_bytes == BLOCK


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("stamps", [(100, 200), (200, 100)])
def test_both_in_one_segment(stamps, pinned):
    scene = Scene()
    by_stamp = dict(zip(stamps, (FIRST, LATER), strict=True))
    held = told((1, FIRST, stamps[0]), (2, 5, 150), (1, LATER, stamps[1]), (3, 6, 1), pinned=pinned)
    scene.register("n", untouched=False, held=held)
    assert known(scene, 1) == {by_stamp[200]}
    assert [known(scene, 2), known(scene, 3)] == [{5}, {6}]
    scene.pass_time(25.0, "n")
    assert scene.figures.committed_bytes == 3 * BLOCK


def test_any_order_of_nodes_and_tales(rng):
    for _ in range(60):
        nodes = rng.randrange(1, 5)
        stamps = itertools.count(1)
        tales: list[list[tuple[int, int, int]]] = [[] for _ in range(nodes)]
        latest: dict[int, tuple[int, int]] = {}
        for _ in range(rng.randrange(1, 25)):
            number, checksum, stamp = rng.randrange(4), rng.randrange(3), next(stamps)
            latest[number] = stamp, checksum
            rng.choice(tales).append((number, checksum, stamp))
        scene = Scene()
        for node in rng.sample(range(nodes), nodes):
            told_here = rng.sample(tales[node], len(tales[node]))
            held = told(*told_here) if told_here else HeldBlocks()
            scene.register(f"n{node}", blocks=32, untouched=False, held=held)
        assert {i: known(scene, i) for i in latest} == {i: {c} for i, (_, c) in latest.items()}


def test_what_was_put_since_and_what_has_no_stamp_stays():
    scene = Scene("n")
    assert scene.put("w", 1, checksum=FIRST) == ["granted"]
    scene.register("late", untouched=False, held=told((1, LATER, 1 << 62)))
    assert known(scene, 1) == {FIRST}
    for stamps in ((0, 200), (200, 0), (0, 0), (7, 7)):
        scene = Scene()
        scene.register("n0", untouched=False, held=told((1, FIRST, stamps[0])))
        scene.register("n1", untouched=False, held=told((1, LATER, stamps[1])))
        assert known(scene, 1) == {FIRST}


def test_a_copy_is_as_old_as_what_was_copied():
    scene = Scene()
    scene.register("n0", untouched=False, held=told((1, FIRST, 100)))
    scene.register("n1", untouched=False, held=told((1, FIRST, 0)))
    assert len(scene.catalog.copies(key(1))) == 2
    scene.register("n2", untouched=False, held=told((1, LATER, 200)))
    assert known(scene, 1) == {LATER}
    scene.pass_time(25.0, "n0", "n1", "n2")
    assert scene.figures.committed_bytes == BLOCK


@pytest.mark.parametrize("stamp", [-1, 1 << 63])
def test_times_that_nobody_can_have(stamp):
    assert Scene().refused(
        m.Register("n", "n:1", 8 * BLOCK, False, told((1, FIRST, stamp)))
    ) is m.RefusalReason.MALFORMED  # fmt: skip


def test_a_node_tells_when_it_was_told(stack):
    pool = Pool(stack)
    (node,) = pool.nodes
    (segment,) = node.segments
    before = time.time_ns()
    names = [secrets.token_hex(8) for _ in range(8)]
    for name in names[:4]:
        assert pool.store.put(name, secrets.token_bytes(5000)) == "stored"
    assert list(pool.store.put_batch(names[4:], [secrets.token_bytes(5000)] * 4)) == ["stored"] * 4
    sent = told((1, FIRST, 0))  # by who has no clock of ours
    node.on_notify("somebody", encode_to_node(Written(HeldBlocks(
        sent.keys, [7 << 20], sent.lengths, sent.checksums), 0)))  # fmt: skip
    blocks = sorted(segment.index.blocks(), key=lambda block: block.offset)
    assert len(blocks) == 9
    slack = 10**9  # the clocks may be set meanwhile, by that
    assert all(before - slack < block.stamp < time.time_ns() + slack for block in blocks)
    copied = told((2, FIRST, told_at(5)))
    segment.record(HeldBlocks(
        copied.keys, [6 << 20], copied.lengths, copied.checksums, stamps=copied.stamps
    ))  # fmt: skip
    assert segment.index.at(6 << 20).stamp == told_at(5)


def test_the_log_keeps_stamps_and_reads_records_without(tmp_path):
    nbytes, slab = 1 << 20, secrets.token_bytes(16)
    log = index_log.IndexLog(tmp_path / "index", nbytes)
    assert not log.open()
    blocks = [
        IndexedBlock(offset=4096 * i, length=64, key=secrets.token_bytes(16), checksum=i, stamp=i)
        for i in range(1, 5)
    ]
    log.replace(slab, blocks[:2])
    log.append(log.put_record(blocks[2]))
    body = index_log.PUT_BODY.pack(
        index_log.PUT, False, blocks[3].offset, 64, 4, 0, blocks[3].key, 1
    )
    log.append(index_log._framed(body + b"tg", index_log._seed_of(slab)))
    log.close()
    again = index_log.IndexLog(tmp_path / "index", nbytes)
    assert again.open()
    found = list(again.replay())
    again.close()
    assert [block.stamp for block in found] == [1, 2, 3, 0]
    assert [block.key for block in found] == [block.key for block in blocks]
    assert (found[3].tenant, found[3].group) == ("t", "g")
