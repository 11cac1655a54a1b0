"""Windows into mapped memory: one key opens what it says, and nothing is left of it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.support.engines import (
    BOTH,
    engine_pair,
    offer,
    open_descriptors,
)
from tests.support.waits import eventually
from transfer import Access, AccessRefused, RegionKey, allocate


def num_mappings() -> int:
    """How often a memory file of ours is mapped into this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return maps.count("memfd:moe-runtime")


def test_nothing_is_left_after_a_thousand_windows() -> None:
    with engine_pair() as (a, b):
        source = a.register(allocate(4096))
        windows = a._table.ready(b.name).windows
        first = None
        for i in range(1000):
            memory = allocate(8192)
            region = b.register(memory)
            key = offer(b, region, a)
            a.write(b.name, source, key, 0, 0, 64).wait()
            assert b.release(region), i
            memory.close()
            del memory, region
            if i == 10:
                eventually(lambda: len(windows._windows) <= 1, "withdrawn keys are forgotten")
                gc.collect()
                first = (open_descriptors(), num_mappings())
        eventually(lambda: not windows._windows, "the last key is forgotten")
        gc.collect()
        rest = (open_descriptors(), num_mappings())
        assert first is not None
        assert rest[0] <= first[0]
        assert rest[1] <= first[1] + 2


@pytest.mark.parametrize("forged", [{"nbytes": 8192}, {"rights": 3}, {"nbytes": 1 << 40}])
def test_a_key_with_other_words_opens_nothing(forged: dict[str, int]) -> None:
    with engine_pair() as (a, b):
        memory = allocate(8192)
        key = offer(b, b.register(memory), a, Access.READ, nbytes=4096)
        target = a.register(torch.zeros(8192, dtype=torch.uint8))
        a.read(b.name, target, key, 0, 0, 4096).wait()
        fields = {name: getattr(key, name) for name in key.__struct_fields__} | forged
        other = RegionKey(**fields)
        with pytest.raises(AccessRefused):
            a.write(b.name, target, other, 0, 0, 64).wait()
        if "nbytes" in forged:
            with pytest.raises(AccessRefused):
                a.read(b.name, target, other, 0, 4096, 64).wait()
        assert not memory.tensor.any()
        a.read(b.name, target, key, 0, 0, 4096).wait()


def test_a_prepared_write_ends_with_its_key() -> None:
    with engine_pair() as (a, b):
        memory = allocate(4096)
        key = offer(b, b.register(memory), a, BOTH)
        source = a.register(torch.ones(4096, dtype=torch.uint8))
        prepared = a.prepare_write(b.name, source, key, 0, 0, 4096)
        prepared.post().wait()
        assert bool(memory.tensor.all())
        b.withdraw(key)
        windows = a._table.ready(b.name).windows
        eventually(lambda: windows.find(key) is None, "the key is forgotten")
        memory.tensor.zero_()
        with pytest.raises(AccessRefused):
            prepared.post().wait()
        assert not memory.tensor.any()
