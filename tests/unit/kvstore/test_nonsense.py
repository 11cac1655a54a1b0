"""Arguments of the store's calls that make no sense: refused by name, before anything is asked."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import KVStoreConfig
from kvstore import InvalidValue, Medium, Pin, PutOptions, PutOutcome, Store
from tests.support.store_pool import Pool
from transfer import allocate

KEYS = [secrets.token_bytes(16) for _ in range(3)]


@pytest.fixture
def pool(stack):
    return Pool(stack)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("replicas", "2"),
        ("replicas", 1.5),
        ("replicas", True),
        ("chunk_bytes", 2.5),
        ("chunk_bytes", 1 << 63),
        ("pin", 2),
        ("pin", "hard"),
        ("pin", None),
        ("pin_s", "1"),
        ("group", None),
        ("group", b"letters"),
        ("group", "\ud800"),
        ("media", "ssd"),
        ("media", ("tape",)),
        ("media", (None,)),
        ("media", ([],)),
        ("prefer", "node"),
        ("prefer", (1,)),
        ("prefer", None),
        ("wait_for_space", "no"),
        ("wait_for_space", 1),
        ("chain", "tokens"),
    ],
)
def test_options_of_a_put(option: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match="group" if option == "group" else option):
        PutOptions(**{option: value})


def test_options_that_make_sense():
    PutOptions(media=("ssd", Medium.DRAM), prefer=["a"], pin=Pin.SOFT, pin_s=1, group="ü" * 64)


@pytest.mark.parametrize("quickly", [False, True])
def test_what_are_no_options(pool, quickly):
    if quickly:  # a size that was stored takes the short way from then on
        assert pool.store.put("first", b"value") is PutOutcome.STORED
    for options in (None, {}, "ssd", Pin.HARD):
        with pytest.raises(InvalidValue, match="options are PutOptions"):
            pool.store.put("name", b"value", options=options)
        with pytest.raises(InvalidValue, match="options are PutOptions"):
            pool.store.put_batch(["name"], [b"value"], options=options)
    assert pool.store.get("name") is None
    assert pool.master.statistics().open_puts == 0


@pytest.mark.parametrize(
    "value",
    [
        torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True),
        torch.zeros(2, device="meta"),
        np.array([object()]),
    ],
    ids=["sparse", "meta", "objects"],
)
def test_values_whose_bytes_are_nowhere(pool, value):
    with pytest.raises(InvalidValue):
        pool.store.put("name", value)
    with pytest.raises(InvalidValue):
        pool.store.put_tensor("name", value)
    pool.store.put("name", b"value")
    with pytest.raises(InvalidValue):
        pool.store.get_into("name", value)


@pytest.mark.parametrize("tensor", [None, "text", b"bytes", 7, [1.0], np.zeros(3)], ids=repr)
def test_what_is_no_tensor(pool, tensor):
    with pytest.raises(InvalidValue, match="no tensor"):
        pool.store.put_tensor("name", tensor)


def test_groups_and_pins(pool):
    for group in (b"letters", "\ud800", 7, "x" * 65, np.zeros(3)):
        with pytest.raises(InvalidValue, match="group"):
            pool.store.remove_batch([], group=group)
        with pytest.raises(InvalidValue, match="group"):
            pool.store.set_pin([], Pin.SOFT, group=group)
    for pin in (None, "soft", 1, 7):
        with pytest.raises(InvalidValue, match="pin"):
            pool.store.set_pin(["name"], pin)
    for pin_s in (-1, float("nan"), float("inf")):
        with pytest.raises(InvalidValue, match="pin_s"):
            pool.store.set_pin(["name"], Pin.SOFT, pin_s=pin_s)


def test_columns_of_blocks(pool, stack):
    client = pool.store.client
    memory = allocate(1 << 16)
    stack.callback(memory.close)
    region = pool.store.register(memory)
    for offsets, lengths in (
        ([0.5, 0, 0], 8),
        (np.array([0.5, 0, 0]), 8),
        ("abc", 8),
        ([0, 1 << 63, 1], 8),
        (np.array([0, 1 << 63, 1], dtype=np.uint64), 8),
        ([[0], [0, 1], [2]], 8),
        ([None, 0, 0], 8),
        ([True, False, True], 8),
        ([0, 1, 2], 2.5),
        ([0, 1, 2], None),
        ([0, 1, 2], [8, 8.5, 8]),
    ):
        with pytest.raises(InvalidValue, match="integers"):
            client.put(KEYS, region, offsets, lengths)
    with pytest.raises(InvalidValue, match="no region"):
        client.put(KEYS, None, [0, 8, 16], 8)
    assert pool.master.statistics().open_puts == 0
    unsigned = np.array([0, 8, 16], dtype=np.uint64)
    assert client.put(KEYS, region, unsigned, [8, 8, 8]) == (PutOutcome.STORED,) * 3


@pytest.mark.parametrize("masters", [None, 5, [], (), [None], "", "nowhere", ["a:1", 2]], ids=repr)
def test_masters_that_are_none(masters):
    with pytest.raises((TypeError, ValueError), match=r"master|HOST:PORT"):
        Store.connect(masters, secret=b"secret", config=KVStoreConfig())
