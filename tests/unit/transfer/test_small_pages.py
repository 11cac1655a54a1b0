"""Memory in small pages is known as such, and reaches a slab by way of a buffer in huge ones."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import FileConfig
from tests.support.disk_calls import in_python
from transfer import allocate
from transfer.backends.file import FileSlab
from transfer.backends.file_work import BOUNCED_BYTES_MIN
from transfer.memory.memory import Pages
from transfer.memory.small_pages import SmallPages, small_pages

SLAB_BYTES = 4 << 20
WHOLE = 1 << 20


class Owner:
    """Something whose end can be waited for."""


def test_ranges_are_held_as_long_as_their_owners_live() -> None:
    pages, page = SmallPages(), 4096
    owners = {start: Owner() for start in random.sample(range(0, 1 << 30, 1 << 20), 20)}
    for start, owner in owners.items():
        pages.add(owner, start, 3 * page)
    for start in owners:
        assert pages.hold(start, 3 * page)
        assert pages.hold(start + page, page)
        assert not pages.hold(start + page, 3 * page), "longer than what is known"
        assert not pages.hold(start - 1, 2)
    kept = dict(list(owners.items())[::2])
    gone = owners.keys() - kept.keys()
    owners.clear()
    del owner
    gc.collect()
    assert all(pages.hold(start, 1) for start in kept)
    assert not any(pages.hold(start, 1) for start in gone)


def test_an_address_that_is_used_again_belongs_to_its_later_owner() -> None:
    pages, first, second = SmallPages(), Owner(), Owner()
    pages.add(first, 4096, 4096)
    pages.add(second, 4096, 8192)
    del first
    gc.collect()
    assert pages.hold(4096, 8192)


def test_allocated_memory_says_what_it_lies_in() -> None:
    memory = allocate(WHOLE, huge_pages=False)
    start = memory.start
    assert memory.pages is Pages.PLAIN
    assert small_pages.hold(start, WHOLE)
    memory.close()
    del memory
    gc.collect()
    assert not small_pages.hold(start, WHOLE)


def in_small_pages(nbytes: int) -> tuple[Any, np.ndarray]:
    memory = allocate(nbytes, huge_pages=False)
    return memory, memory.tensor.numpy()


@pytest.mark.parametrize("nbytes", [BOUNCED_BYTES_MIN // 2, BOUNCED_BYTES_MIN, WHOLE])
def test_large_calls_go_by_way_of_the_slabs_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    places: list[int] = []

    def spied(name: str) -> None:
        call = getattr(os, name)

        def spy(fd: int, buffers: Any, offset: int) -> int:
            places.extend(np.frombuffer(b, dtype=np.uint8).ctypes.data for b in buffers)
            return call(fd, buffers, offset)

        monkeypatch.setattr(os, name, spy)

    memory, array = in_small_pages(2 * WHOLE)
    with FileSlab(tmp_path / "slab", SLAB_BYTES, FileConfig(threads=2)) as slab:
        if not slab.alignment.direct:
            pytest.skip(f"no direct access: {slab.alignment.why_buffered}")
        in_python(monkeypatch)
        spied("preadv")
        spied("pwritev")
        array[:nbytes] = np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8)
        slab.write(memory.tensor, 0, WHOLE, nbytes)
        slab.read(memory.tensor, WHOLE, WHOLE, nbytes)
    assert np.array_equal(array[:nbytes], array[WHOLE : WHOLE + nbytes])
    assert len(places) == 2
    of_caller = [memory.start <= place < memory.start + memory.nbytes for place in places]
    assert of_caller == [nbytes < BOUNCED_BYTES_MIN] * 2
    memory.close()


def test_other_memory_is_reached_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    preadv = os.preadv

    def spy(fd: int, buffers: Any, offset: int) -> int:
        places.extend(np.frombuffer(b, dtype=np.uint8).ctypes.data for b in buffers)
        return preadv(fd, buffers, offset)

    buffer = torch.ones(2 * WHOLE, dtype=torch.uint8)
    start = -buffer.data_ptr() % 4096
    with FileSlab(tmp_path / "slab", SLAB_BYTES, FileConfig(threads=2)) as slab:
        in_python(monkeypatch)
        monkeypatch.setattr(os, "preadv", spy)
        assert not small_pages.hold(buffer.data_ptr() + start, WHOLE)
        slab.read(buffer, start, 0, WHOLE)
    assert places == [buffer.data_ptr() + start]
    assert not buffer[start : start + WHOLE].any()
