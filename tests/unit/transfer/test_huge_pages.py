"""Memory files are in huge pages whatever the policy is, and peers know which ones are."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.engines import open_descriptors
from transfer import allocate
from transfer.backends.shared_memory import MappedMemory
from transfer.memory import memory as memory_module
from transfer.memory.huge_pages import AlignedMapping, collapse, huge_page_bytes
from transfer.memory.memory import COLLAPSED_NAME, Memory, Pages, has_small_pages
from transfer.memory.small_pages import small_pages

HUGE = huge_page_bytes() or 2 << 20
TAIL = 3 * mmap.PAGESIZE


def mapped_huge(start: int) -> int:
    """Bytes that the kernel has mapped as huge pages in the mapping which begins there."""
    text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    match = re.search(rf"^{start:x}-.*?^ShmemPmdMapped:\s+(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert match is not None, hex(start)
    return int(match[1]) << 10


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("/memfd:")


def new_file(nbytes: int) -> int:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, nbytes)
    return descriptor


def kernel_collapses(nbytes: int = HUGE) -> bool:
    descriptor = new_file(nbytes)
    try:
        return collapse(AlignedMapping(descriptor, nbytes))
    finally:
        os.close(descriptor)


def allocated(nbytes: int) -> Memory:
    """Memory in huge pages; without any that are free there is nothing to look at."""
    memory = allocate(nbytes)
    if memory.pages is Pages.PLAIN and not kernel_collapses(nbytes):
        pytest.skip("the kernel has no huge pages that are free")
    return memory


needs_collapse = pytest.mark.skipif(
    not kernel_collapses(), reason="the kernel makes no huge pages of memory files (MADV_COLLAPSE)"
)


def use_plain_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_pool", lambda _: (0, 0))
    monkeypatch.setattr(memory_module, "_asks_for_huge", lambda: False)


@needs_collapse
@pytest.mark.parametrize("nbytes", [HUGE, 3 * HUGE + TAIL - 5])
def test_memory_is_in_huge_pages_whatever_the_policy(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    use_plain_policy(monkeypatch)
    memory = allocated(nbytes)
    assert memory.pages is Pages.TRANSPARENT
    assert memory.start % HUGE == 0
    assert mapped_huge(memory.start) == nbytes // HUGE * HUGE
    assert memory.tensor.numel() == nbytes
    assert not memory.tensor.any(), "new memory is zeroed"
    assert not small_pages.hold(memory.start, nbytes)
    assert not has_small_pages(memory.fd)
    memory.close()


@needs_collapse
@pytest.mark.parametrize("writable", [False, True])
def test_a_peers_mapping_is_in_huge_pages_too(
    monkeypatch: pytest.MonkeyPatch, *, writable: bool
) -> None:
    use_plain_policy(monkeypatch)
    memory = allocated(2 * HUGE + TAIL)
    window = MappedMemory(memory.fd, memory.nbytes, writable=writable)
    start = window.array.ctypes.data
    assert mapped_huge(start) == 2 * HUGE
    assert not small_pages.hold(start, memory.nbytes)
    assert window.array.flags.writeable is writable
    content = np.random.default_rng().integers(0, 256, memory.nbytes, dtype=np.uint8)
    memory.tensor.numpy()[:] = content
    assert np.array_equal(window.array, content)
    if writable:
        window.array[::97] ^= 1
        content[::97] ^= 1
        assert np.array_equal(memory.tensor.numpy(), content)
    memory.close()


def test_where_the_kernel_makes_none_pages_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plain_policy(monkeypatch)
    asked: list[int] = []

    def refuse(self: AlignedMapping, advice: int, *_: int) -> None:
        asked.append(advice)
        raise OSError(errno.EINVAL, "no such advice")

    gc.collect()
    before = open_descriptors(), num_mappings()
    with monkeypatch.context() as patched:
        patched.setattr(AlignedMapping, "madvise", refuse)
        patched.setattr(memory_module, "huge_page_bytes", lambda: HUGE)
        memory = Memory(2 * HUGE)
    assert asked, "it was asked for"
    assert memory.pages is Pages.PLAIN
    assert small_pages.hold(memory.start, 2 * HUGE)
    assert has_small_pages(memory.fd)
    assert COLLAPSED_NAME not in os.readlink(f"/proc/self/fd/{memory.fd}")
    assert not memory.tensor.any()
    memory.close()
    del memory
    gc.collect()
    assert (open_descriptors(), num_mappings()) == before, "nothing is left of the attempt"


def test_small_memory_wastes_no_huge_page(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plain_policy(monkeypatch)
    for nbytes in (1, HUGE - 1):
        memory = allocate(nbytes)
        assert memory.pages is Pages.PLAIN
        memory.close()


def test_a_mapping_goes_with_its_last_view() -> None:
    gc.collect()
    before, nbytes = num_mappings(), HUGE + TAIL
    descriptor = new_file(nbytes)
    mapping = AlignedMapping(descriptor, nbytes)
    os.close(descriptor)
    assert len(mapping) == nbytes
    assert mapping.start % HUGE == 0
    view = np.frombuffer(mapping.buffer, dtype=np.uint8)[random.randrange(HUGE) :]
    view[0] = 7
    del mapping
    gc.collect()
    assert num_mappings() == before + 1
    assert view[0] == 7
    del view
    gc.collect()
    assert num_mappings() == before


def test_what_cannot_be_mapped_leaves_nothing() -> None:
    gc.collect()
    before = Path("/proc/self/maps").read_text(encoding="utf-8").count("\n")
    reader, writer = os.pipe()
    for descriptor, nbytes in ((reader, HUGE), (new_file(HUGE), 1 << 62)):
        with pytest.raises(OSError, match="mmap"):
            AlignedMapping(descriptor, nbytes)
        os.close(descriptor)
    os.close(writer)
    assert Path("/proc/self/maps").read_text(encoding="utf-8").count("\n") <= before + 1
