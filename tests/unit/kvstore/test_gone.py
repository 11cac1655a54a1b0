"""What is remembered of evicted blocks: against a dictionary, compiled and not; and its size."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict

import pytest

from kvstore import row_loops
from kvstore.eviction import gone as gone_blocks
from kvstore.eviction.gone import GoneBlocks

LOOPS = ("remember", "recall", "forget", "close_up")


@pytest.fixture(params=["plain", "compiled"])
def loops(request, monkeypatch):
    if request.param == "compiled" and not row_loops.COMPILED:
        pytest.skip("no compiled loops here")
    if request.param == "plain":
        for name in LOOPS:
            monkeypatch.setattr(row_loops, name, getattr(row_loops, f"_{name}"))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("moved", [1, gone_blocks.MOVED_PER_NAME])
@pytest.mark.parametrize(("most", "returning"), [(5, 0.5), (300, 0.0), (300, 0.3), (300, 0.9)])
def test_it_is_a_queue_that_anybody_may_leave(rng, monkeypatch, most, returning, moved):
    monkeypatch.setattr(gone_blocks, "MOVED_PER_NAME", moved)
    gone, model, number, left = GoneBlocks(), OrderedDict(), 0, []
    for _ in range(600):
        leaving = [name for name in model if rng.random() < returning / 10]
        rng.shuffle(leaving)
        # Who has left, or was forgotten, is asked for again: also while a ring is followed by one.
        again = [name for name in rng.sample(left, min(len(left), 40)) if name not in model]
        asked = leaving + again + [rng.randbytes(16) for _ in range(3)]
        assert gone.returned(asked) == [model.pop(name, None) for name in asked]
        coming = [rng.randbytes(16) for _ in range(rng.randrange(0, most // 2))]
        coming += leaving[:1]
        numbers = list(range(number, number + len(coming)))
        number += len(coming) + rng.randrange(1 << 40)
        gone.extend(coming, numbers)
        model.update(zip(coming, numbers, strict=True))
        left = [*left, *coming][-4 * most :]
        length = rng.randrange(most)
        expected = [model.popitem(last=False)[1] for _ in range(max(0, len(model) - length))]
        assert gone.shrink(length) == expected
        assert len(gone) == len(model)
        assert gone._ring._room <= 2 * most + 200
    assert gone.returned(list(model)) == list(model.values())
    assert len(gone) == 0


@pytest.mark.usefixtures("loops")
def test_who_has_left_while_names_move_is_not_there_again(rng, monkeypatch):
    monkeypatch.setattr(gone_blocks, "MOVED_PER_NAME", 1)
    gone, names = GoneBlocks(), [rng.randbytes(16) for _ in range(300)]
    for number, name in enumerate(names):
        gone.extend([name], [number])
    while gone._former is None or gone._moved < 10:
        names.append(rng.randbytes(16))
        gone.extend(names[-1:], [len(names) - 1])
    assert gone.returned(names[:2]) == [0, 1]
    assert gone.shrink(len(gone) - 3) == [2, 3, 4]
    assert gone._former is not None, "all names have moved: this shows nothing"
    assert gone.returned(names[:5]) == [None] * 5
    assert len(gone) == len(names) - 5
    assert gone.returned(names) == [None] * 5 + list(range(5, len(names)))
    assert len(gone) == 0


@pytest.mark.skipif(not row_loops.COMPILED, reason="no compiled loops here")
def test_both_find_the_same_in_crowded_slots(rng):
    """Prints that are alike, at the end of the slots too: the order of search must not matter."""
    room = 40
    slots = room + 5
    names = [rng.randrange(1 << 62) for _ in range(20000)]
    crowded = sorted(names, key=row_loops._print_of)
    chosen = crowded[-25:] + crowded[:15]
    rings = []
    for prefix in ("_", ""):
        call = {name: getattr(row_loops, prefix + name) for name in LOOPS}
        ring = array("I", bytes(4 * room)), array("q", bytes(8 * room)), array("i", [-1] * slots)
        call["remember"](*ring, chosen, list(range(room)), 0)
        found = [call["recall"](*ring, chosen[::3])]
        found.append(call["forget"](*ring, 0, room, 7))
        after = array("I", bytes(4 * room)), array("q", bytes(8 * room)), array("i", [-1] * slots)
        found.append(call["close_up"](*ring, *after, found[1][1], room, 0))
        found.append(call["recall"](*after, chosen))
        rings.append(found)
    assert rings[0] == rings[1]
    assert rings[0][3].count(None) == room - rings[0][2]


@pytest.mark.skipif(not row_loops.COMPILED, reason="no compiled loops here")
def test_nonsense_is_refused():
    ring = array("I", bytes(16)), array("q", bytes(32)), array("i", [-1] * 6)
    for columns in (
        (ring[1], ring[1], ring[2]),
        (ring[0], ring[0], ring[2]),
        (ring[0], ring[1], ring[1]),
        (ring[0], ring[1], b"x"),
    ):
        with pytest.raises((TypeError, BufferError)):
            row_loops.recall(*columns, [b"x"])
    with pytest.raises(ValueError, match="more slots"):
        row_loops.recall(ring[0], ring[1], array("i", [-1] * 4), [b"x"])
    with pytest.raises(ValueError, match="more slots"):
        row_loops.recall(ring[0], array("q", bytes(8)), ring[2], [b"x"])
    with pytest.raises(IndexError):
        row_loops.remember(*ring, [b"x"], [1], 4)
    with pytest.raises(IndexError):
        row_loops.remember(*ring, [b"x"], [1], -1)
    with pytest.raises(TypeError):
        row_loops.remember(*ring, [b"x"], [1, 2], 0)
    with pytest.raises(TypeError):
        row_loops.remember(*ring, [[]], [1], 0)
    with pytest.raises(OverflowError):
        row_loops.remember(*ring, [b"x"], [1 << 70], 0)
    with pytest.raises(IndexError):
        row_loops.forget(*ring, 0, 5, 1)
    with pytest.raises(IndexError):
        row_loops.close_up(*ring, *ring, 0, 5, 0)
    assert list(ring[2]) == [-1] * 6
    assert row_loops.recall(*ring, [b"x"]) == [None]


def test_it_takes_few_bytes_a_name_also_after_many_went_through(rng):
    gone, count = GoneBlocks(), 20_000
    for start in range(0, 6 * count, 500):
        names = [(start + i).to_bytes(16, "big") for i in range(500)]
        gone.extend(names, list(range(start, start + 500)))
        gone.shrink(count)
        if rng.random() < 0.5:
            gone.returned(names[::7])
        if gone._former is None:
            nbytes = sum(sys.getsizeof(column) for column in gone._ring.columns)
            assert nbytes / max(len(gone), count // 2) < 26


def test_few_that_were_never_here_are_taken_for_others(rng):
    gone, count = GoneBlocks(), 50_000
    gone.extend([rng.randbytes(16) for _ in range(count)], [0] * count)
    strangers = [rng.randbytes(16) for _ in range(count)]
    wrong = count - gone.returned(strangers).count(None)
    assert wrong < 20, "expected is 0.6"
