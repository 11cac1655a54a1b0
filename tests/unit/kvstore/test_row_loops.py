"""The compiled loops and those in Python against plain lists, with columns of every type."""

from __future__ import annotations

import random
import secrets
from array import array
from types import SimpleNamespace

import pytest

from kvstore import row_loops

NAMES = (
    *("gather", "total", "all_are", "all_own", "where", "fill", "stairs", "scatter", "add"),
    *("pick", "place", "claim", "drop", "extend", "renew", "follow"),
)
RANGES = {
    "B": (0, 255),
    "i": (-(1 << 31), (1 << 31) - 1),
    "I": (0, (1 << 32) - 1),
    "q": (-(1 << 63), (1 << 63) - 1),
    "Q": (0, (1 << 64) - 1),
}
PLAIN = SimpleNamespace(**{name: getattr(row_loops, f"_{name}") for name in NAMES})
COMPILED = SimpleNamespace(**{name: getattr(row_loops, name) for name in NAMES})


@pytest.fixture
def rng():
    seed = secrets.randbits(32)
    print("seed", seed)
    return random.Random(seed)


@pytest.fixture(params=["plain", "compiled"])
def loops(request):
    if request.param == "compiled" and not row_loops.COMPILED:
        pytest.skip("no compiled loops here")
    return PLAIN if request.param == "plain" else COMPILED


def a_column(rng, kind, count):
    low, high = RANGES[kind]
    few = [rng.randint(low, high) for _ in range(4)]
    return array(kind, [rng.choice([*few, low, high]) for _ in range(count)])


@pytest.mark.parametrize("kind", RANGES)
def test_values_of_rows(loops, rng, kind):
    for _ in range(40):
        count = rng.randrange(1, 400)
        column = a_column(rng, kind, count)
        values = list(column)
        rows = [rng.randrange(count) for _ in range(rng.choice([0, 1, 7, count]))]
        wanted = rng.choice(values)
        assert loops.gather(column, rows) == [values[row] for row in rows]
        assert loops.where(column, rows, wanted) == [row for row in rows if values[row] == wanted]
        assert loops.all_are(column, rows, wanted) is all(values[row] == wanted for row in rows)
        same = [row for row in range(count) if values[row] == wanted]
        assert loops.all_are(column, tuple(same), wanted) is True
        fresh = [rng.randint(*RANGES[kind]) for _ in rows]
        loops.scatter(column, rows, fresh)
        for row, value in zip(rows, fresh, strict=True):
            values[row] = value
        assert list(column) == values
        loops.fill(column, rows, wanted)
        for row in rows:
            values[row] = wanted
        assert list(column) == values


def test_totals_and_stairs(loops, rng):
    for kind in "Iq":
        column = array(kind, [rng.randrange(1 << 32) for _ in range(300)])
        rows = rng.sample(range(300), 200)
        assert loops.total(column, rows) == sum(column[row] for row in rows)
        assert loops.total(column, []) == 0
    column = array("q", bytes(8 * 300))
    first, step = rng.randrange(1 << 40), rng.randrange(1 << 20)
    loops.stairs(column, rows, first, step)
    assert [column[row] for row in rows] == [first + step * i for i in range(200)]
    loops.stairs(column, [], first, step)
    own = array("i", range(50))
    assert loops.all_own(own, range(50))
    own[rng.randrange(50)] += 1
    assert not loops.all_own(own, list(range(50)))


def test_counting_tells_what_was_reached_in_its_turn(loops, rng):
    column, values = array("i", bytes(4 * 40)), [0] * 40
    for _ in range(200):
        rows = [rng.randrange(40) for _ in range(rng.randrange(150))]
        delta, reached = rng.choice([(1, 1), (-1, 0)])
        expected = []
        for row in rows:
            values[row] += delta
            expected += [row] * (values[row] == reached)
        assert loops.add(column, rows, delta, reached) == expected
        assert list(column) == values


def test_objects_and_keys(loops, rng):
    names = [b""] * 300
    keys = [rng.randbytes(16) for _ in range(200)]
    rows = rng.sample(range(300), 200)
    loops.place(names, rows, keys)
    assert loops.pick(names, rows) == keys
    index = dict(zip(keys[:60], rows[:60], strict=True))
    index[keys[3]] = index[keys[40]] = 1000
    assert loops.claim(index, keys, rows) == [3, 40]
    assert index == {**dict(zip(keys, rows, strict=True)), keys[3]: 1000, keys[40]: 1000}
    assert loops.claim(index, [keys[0], keys[0]], [rows[0], -5]) == [1]
    loops.drop(index, keys[:150])
    assert list(index) == keys[150:]
    with pytest.raises(KeyError):
        loops.drop(index, [keys[0]])


def test_queues_are_linked_as_lists_say(loops, rng):
    older, newer = (array("i", bytes(4 * 300)) for _ in range(2))
    ends, order = (-1, -1), []
    for _ in range(60):
        new = rng.sample([row for row in range(300) if row not in order], rng.randrange(1, 5))
        ends = loops.extend(older, newer, new, *ends)
        order += new
        used = [rng.choice(order) for _ in range(rng.randrange(200))]
        ends = loops.renew(older, newer, used, *ends)
        for row in used:
            order.remove(row)
            order.append(row)
        assert ends == (order[0], order[-1])
        assert loops.follow(newer, ends[0], 1000) == order
        assert loops.follow(older, ends[1], 1000) == order[::-1]
        assert loops.follow(newer, ends[0], 3) == order[:3]
    assert loops.extend(older, newer, [], *ends) == ends
    assert loops.follow(newer, -1, 5) == []


@pytest.mark.skipif(not row_loops.COMPILED, reason="no compiled loops here")
def test_the_compiled_ones_refuse_what_they_cannot_do():
    column = array("i", range(10))
    before = list(column)
    for rows in ([3, 10], [3, -1], [1 << 40]):
        with pytest.raises(IndexError):
            row_loops.fill(column, rows, 7)
    for value in (1 << 31, -(1 << 31) - 1, 1 << 70):
        with pytest.raises(OverflowError):
            row_loops.fill(column, [3], value)
        with pytest.raises(OverflowError):
            row_loops.scatter(column, [1, 2], [5, value])
    with pytest.raises(OverflowError):
        row_loops.stairs(column, [1, 2, 3], 5, 1 << 30)
    with pytest.raises(ValueError, match="2 rows, 1 values"):
        row_loops.scatter(column, [1, 2], [5])
    with pytest.raises(TypeError):
        row_loops.gather(array("d", [1.0]), [0])
    with pytest.raises(TypeError):
        row_loops.gather(column, 7)
    with pytest.raises(TypeError):
        row_loops.fill(column, ["a"], 7)
    with pytest.raises(ValueError, match="not in the queue"):
        row_loops.renew(array("i", [-9] * 3), array("i", [-1] * 3), [1], 0, 2)
    with pytest.raises(OverflowError):
        row_loops.total(array("q", [1 << 62] * 2), [0, 1])
    assert list(column) == before
