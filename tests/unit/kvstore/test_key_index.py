"""The dictionary of a master's blocks: against Python's, compiled and not; and its size."""

from __future__ import annotations

import sys
from collections import deque

import pytest

from kvstore import row_loops
from kvstore.key_index import PlainKeyIndex, make_key_index

compiled_only = pytest.mark.skipif(not row_loops.COMPILED, reason="no compiled loops here")
STEPS = 4000


@pytest.fixture(params=["plain", "compiled"])
def make(request):
    if request.param == "plain":
        return PlainKeyIndex
    if not row_loops.COMPILED:
        pytest.skip("no compiled loops here")
    return make_key_index


def crowded(rng):
    """Keys whose prints lie side by side, at both ends: all want the same few slots."""
    keys = sorted({rng.randbytes(16) for _ in range(20_000)}, key=row_loops._print_of)
    return keys[:60] + keys[-60:]


def enter_many(index, model, keys, fresh, rng):
    rows = rng.sample([row for row in range(len(keys)) if keys[row] == b""], len(fresh))
    for row, key in zip(rows, fresh, strict=True):
        keys[row] = key
    taken = []
    for position, (row, key) in enumerate(zip(rows, fresh, strict=True)):
        if model.setdefault(key, row) != row:
            taken.append(position)
            keys[row] = b""
    # The rows of keys that are there, or come twice, have them for the call too.
    for position in taken:
        keys[rows[position]] = fresh[position]
    assert index.claim(list(fresh), list(rows)) == taken
    for position in taken:
        keys[rows[position]] = b""


def drop_many(index, model, keys, gone):
    index.drop(gone)
    for key in gone:
        keys[model.pop(key)] = b""


@pytest.mark.parametrize("names", ["crowded", "any"])
def test_it_is_a_dictionary(make, names, rng):
    known = crowded(rng) if names == "crowded" else [rng.randbytes(16) for _ in range(300)]
    keys, model = [b""] * 1000, {}
    index = make(keys)
    for step in range(STEPS):
        growing = step % 1000 < 500
        fresh = rng.choices(known, k=rng.randrange(6 if growing else 3))
        enter_many(index, model, keys, fresh, rng)
        gone = rng.sample(sorted(model), min(len(model), rng.randrange(3 if growing else 6)))
        if rng.random() < 0.5:
            drop_many(index, model, keys, gone)
        else:
            for key in gone:
                del index[key]
                keys[model.pop(key)] = b""
        asked = rng.choices(known, k=5)
        assert [index.get(key) for key in asked] == [model.get(key) for key in asked]
        assert [index.get(key, -1) for key in asked] == [model.get(key, -1) for key in asked]
        assert [key in index for key in asked] == [key in model for key in asked]
        assert index.has_any(set(asked)) == any(key in model for key in asked)
        assert len(index) == len(model)
    assert sorted(index.rows()) == sorted(model.values())
    assert all(index[key] == row for key, row in model.items())


def test_one_at_a_time(make):
    keys = [b"a" * 16, b"b" * 16, b"a" * 16, b""]
    index = make(keys)
    assert index.setdefault(keys[0], 0) == 0
    assert index.setdefault(keys[2], 2) == 0
    assert index.setdefault(keys[1], 1) == 1
    index[keys[2]] = 2
    assert index[keys[0]] == 2
    assert sorted(index.rows()) == [1, 2]
    del index[keys[0]]
    for ask in (lambda: index[keys[0]], lambda: index.__delitem__(keys[0])):
        with pytest.raises(KeyError):
            ask()
    with pytest.raises(KeyError):
        index.drop([keys[1], keys[1]])
    assert len(index) == 0
    assert index.get(keys[1]) is None


@compiled_only
def test_it_does_not_grow_where_as_many_keys_go_as_come(rng):
    count = 50_000
    keys = [rng.randbytes(16) for _ in range(count)]
    index, order = make_key_index(keys), deque(range(count))
    assert index.claim(keys, list(range(count))) == []
    before = sys.getsizeof(index)
    assert before / count < 18
    for _ in range(4 * count):
        row = order.popleft()
        del index[keys[row]]
        keys[row] = rng.randbytes(16)
        index[keys[row]] = row
        order.append(row)
    assert sys.getsizeof(index) == before
    assert [index[key] for key in keys] == list(range(count))


@compiled_only
def test_nonsense_is_refused(rng):
    keys = [b"a" * 16]
    index = make_key_index(keys)
    kind = type(index)
    for wrong in ((), (keys, keys), ((b"a",),), ({},)):
        with pytest.raises(TypeError):
            kind(*wrong)
    for key in ("text", None, 7, bytearray(16), [keys]):
        for ask in (index.get, index.__contains__, index.__getitem__, index.__delitem__):
            with pytest.raises(TypeError, match="a key is bytes"):
                ask(key)
        with pytest.raises(TypeError):
            index.claim([key], [0])
        with pytest.raises(TypeError):
            index.has_any([key])
    for row, error in ((-1, IndexError), (1 << 31, IndexError), (1 << 70, OverflowError)):
        with pytest.raises(error):
            index[keys[0]] = row
        with pytest.raises(error):
            index.setdefault(keys[0], row)
        with pytest.raises(error):
            index.claim(list(keys), [row])
    for arguments in ((keys, (0,)), (tuple(keys), [0]), (keys, []), (keys,)):
        with pytest.raises(TypeError):
            index.claim(*arguments)
    for arguments in ((), (keys[0], 1, 2)):
        with pytest.raises(TypeError):
            index.get(*arguments)
    assert len(index) == 0
    index[keys[0]] = 9  # a row that the list does not have: its key is not known, and not looked at
    assert index.get(keys[0]) is None
    assert len(index) == 1
