"""Memory is sealed, zeroed, shared by every mapping, and outlives its close in its views."""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch

from tests.support.engines import open_descriptors
from transfer import allocate
from transfer.memory import memory_of
from transfer.region import Region


def test_memory_is_zeroed_and_sealed() -> None:
    memory = allocate(10_000)
    try:
        assert memory.tensor.dtype == torch.uint8
        assert memory.tensor.numel() == memory.nbytes == 10_000
        assert not memory.tensor.any()
        assert memory.tensor.data_ptr() % mmap.PAGESIZE == 0
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, size)
    finally:
        memory.close()
    memory.close()


def test_views_outlive_close() -> None:
    memory = allocate(4096)
    view = memory.tensor[:16].view(torch.int32)
    view.fill_(7)
    memory.close()
    del memory
    gc.collect()
    assert view.tolist() == [7] * 4


def test_nothing_is_left_of_it() -> None:
    gc.collect()
    before = open_descriptors()
    for _ in range(5):
        allocate(4096).close()
    for _ in range(5):
        allocate(4096)
    gc.collect()
    assert open_descriptors() == before


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_memory_of_no_bytes(nbytes: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        allocate(nbytes)


def test_views_of_a_memory_are_found() -> None:
    memory = allocate(1 << 16)
    view = memory.tensor[4096:8192].view(torch.bfloat16).view(2, 1024)
    assert memory_of(view.data_ptr(), 4096) == (memory, 4096)
    region = Region(view)
    assert region.shareable
    assert (region.memory_offset, region.nbytes) == (4096, 4096)
    assert not Region(torch.zeros(10)).shareable
    memory.close()
    assert memory_of(view.data_ptr(), 4096) is None


def test_a_region_is_the_memory_itself() -> None:
    tensor = torch.zeros(3, 5, dtype=torch.bfloat16)
    region = Region(tensor)
    region.tensor.fill_(0x3F)
    assert region.nbytes == 30
    assert tensor.view(torch.uint8).eq(0x3F).all()


def test_what_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Region(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="host memory"):
        Region(torch.zeros(4, device="meta"))
