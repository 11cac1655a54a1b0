"""Pages in the order of the keys, whatever the keys are and whatever changes meanwhile."""

from __future__ import annotations

import random

import pytest

from kvstore.master.key_order import KeyOrder


def fresh(number, rng, *, kind):
    if kind == "hashes":
        return {rng.randbytes(16) for _ in range(number)}
    if kind == "small":
        return {i.to_bytes(16, "big") for i in range(number)}
    return {b"\xff" * 14 + i.to_bytes(2, "big") for i in range(65536 - number, 65536)}


def listed(order, limit):
    keys, after, more = [], b"", True
    while more:
        page, more = order.after(after, limit)
        assert len(page) <= limit
        assert page or not more
        keys += page
        after = page[-1] if page else after
    return keys


@pytest.mark.parametrize("kind", ["hashes", "small", "large"])
@pytest.mark.parametrize("number", [0, 1, 2, 500, 5000])
def test_all_keys_come_once_and_sorted(kind, number):
    rng = random.Random(seed := random.randrange(1 << 30))
    keys = fresh(number, rng, kind=kind)
    for limit in (1, 7, 1000) if number < 1000 else (64, 6000):
        order = KeyOrder(lambda: keys, window_keys=rng.choice([1, 16, 300, 1 << 15]))
        assert listed(order, limit) == sorted(keys), seed


def test_few_passes_over_the_index():
    rng = random.Random(3)
    keys = fresh(20_000, rng, kind="hashes")
    passes = 0

    def counted():
        nonlocal passes
        passes += 1
        return keys

    assert len(listed(KeyOrder(counted, window_keys=2000), 100)) == 20_000
    assert passes <= 13


def test_a_new_listing_sees_what_came_since():
    keys = {bytes(15) + b"\1"}
    order = KeyOrder(lambda: keys)
    assert len(listed(order, 10)) == 1
    keys.add(bytes(15) + b"\2")
    assert len(listed(order, 10)) == 2


def test_keys_that_stay_are_told_though_others_come_and_go():
    rng = random.Random(seed := random.randrange(1 << 30))
    keys = fresh(3000, rng, kind="hashes")
    staying = set(rng.sample(sorted(keys), 1000))
    order = KeyOrder(lambda: keys, window_keys=400)
    told, after, more = [], b"", True
    while more:
        page, more = order.after(after, 50)
        told += page
        after = page[-1] if page else after
        for gone in rng.sample(sorted(keys - staying), min(40, len(keys) - len(staying))):
            keys.remove(gone)
        keys |= {rng.randbytes(16) for _ in range(30)}
    assert told == sorted(set(told)), seed
    assert staying <= set(told), seed
