"""Memory is sealed, zeroed, shared by every mapping, and outlives its close in its views."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.support.engines import open_descriptors
from transfer import allocate
from transfer.memory import room
from transfer.memory.memory import Pages, memory_of, numa_nodes, prefer_node
from transfer.memory.region import Region


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
    assert open_descriptors() <= before


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_memory_of_no_bytes(nbytes: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        allocate(nbytes)


@pytest.mark.parametrize("times", [2, 1000])
@pytest.mark.parametrize("huge_pages", [True, False])
def test_more_than_the_machine_has_is_refused_before_a_page_is_taken(
    times: int, huge_pages: bool
) -> None:
    memory = psutil.virtual_memory()
    nbytes = times * (memory.total + psutil.swap_memory().total)
    before = open_descriptors()
    with pytest.raises(OSError, match=f"no memory of {nbytes} bytes: [0-9]+ are") as caught:
        allocate(nbytes, huge_pages=huge_pages)
    assert caught.value.errno == errno.ENOMEM
    assert open_descriptors() == before


def test_the_room_is_that_of_the_machine_or_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"MemAvailable": 3000, "SwapFree": 1000}
    limits = (tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes")
    monkeypatch.setattr(room, "_LIMITS", limits)
    for text, nbytes in ((None, 4000 << 10), ("max\n", 4000 << 10), ("2048000\n", 2000 << 10)):
        if text is not None:
            limits[0].write_text(text)
        room.check_room(nbytes, table)
        with pytest.raises(OSError, match=f"{nbytes} are available"):
            room.check_room(nbytes + 1, table)
    limits[1].write_text("1024000")
    with pytest.raises(OSError, match="1024000 are available"):
        room.check_room(2000 << 10, table)
    room.check_room(1 << 60, {})  # nobody knows


@pytest.mark.parametrize("nbytes", [1e6, "4096", None], ids=repr)
def test_no_memory_of_what_is_no_number_of_bytes(nbytes: Any) -> None:
    with pytest.raises(TypeError, match="nbytes must be an int"):
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
    with pytest.raises(TypeError, match=r"a Tensor, got bytearray: .*frombuffer"):
        Region(bytearray(4))  # type: ignore[arg-type]


def test_a_thousand_memories_are_told_apart() -> None:
    memories = [allocate(4096 * (1 + i % 3)) for i in range(1000)]
    for memory in memories:
        for offset in (0, memory.nbytes - 1):
            assert memory_of(memory.start + offset, 1) == (memory, offset)
        assert memory_of(memory.start, memory.nbytes + 1) is None
    looks = [0]

    class Address(int):
        """One that counts how often it is compared."""

        def __lt__(self, other: int) -> bool:
            looks[0] += 1
            return int(self) < other

    for memory in memories:
        assert memory_of(Address(memory.start + 5), 10) == (memory, 5)
    assert len(memories) <= looks[0] < 40 * len(memories)  # a linear search takes a million
    for memory in memories:
        memory.close()
        assert memory_of(memory.start, 1) is None


def test_memory_says_what_it_is_made_of() -> None:
    assert allocate(1 << 22, huge_pages=False).pages is Pages.PLAIN
    memory = allocate(1 << 22)
    assert memory.pages in Pages
    assert memory.nbytes == memory.tensor.numel() == 1 << 22
    assert not memory.tensor.any()


def huge_pages_free() -> int:
    found = re.search(r"HugePages_Free:\s+(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"))
    return int(found[1]) if found else 0


@pytest.mark.skipif(huge_pages_free() < 2, reason="no huge pages were set aside (vm.nr_hugepages)")
def test_memory_of_the_huge_page_pool() -> None:
    memory = allocate(3 << 20)
    assert memory.pages is Pages.POOL
    assert os.fstat(memory.fd).st_size % (2 << 20) == 0
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    memory.tensor.fill_(7)


def test_memory_on_a_node() -> None:
    assert numa_nodes()[0] == 0 or 0 not in numa_nodes()
    assert allocate(4096, numa_node=numa_nodes()[0]).numa_node == numa_nodes()[0]
    with pytest.raises(ValueError, match="NUMA node"):
        allocate(4096, numa_node=max(numa_nodes()) + 1)


def test_the_kernel_takes_a_preference_of_node() -> None:
    mapped = mmap.mmap(-1, 1 << 16)
    prefer_node(mapped, numa_nodes()[0])
    with pytest.raises(OSError, match="mbind"):
        prefer_node(mapped, 1000)


@pytest.mark.skipif(len(numa_nodes()) < 2, reason="this machine has one NUMA node")
def test_pages_come_from_the_node_that_was_asked_for() -> None:
    node = numa_nodes()[-1]
    memory = allocate(1 << 20, numa_node=node)
    maps = Path("/proc/self/numa_maps").read_text(encoding="ascii")
    (line,) = [line for line in maps.splitlines() if line.startswith(f"{memory.start:x} ")]
    assert f"N{node}=256" in line


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_the_first_copy_into_memory_pays_for_no_page() -> None:
    nbytes = 64 << 20
    memory, source = allocate(nbytes), torch.ones(nbytes, dtype=torch.uint8)
    before = faults()
    memory.tensor.copy_(source)
    assert faults() - before < nbytes // 4096 // 10
