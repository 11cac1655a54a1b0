"""Memory of a GPU, handed to the network card as a dma-buf: bytes go there without the host.

CUDA exports a range of its address space as a file, which the kernel lets the card map. Needs a
driver with open kernel modules, and a kernel with dma-buf support in its RDMA stack.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any, Final

import torch
from pyverbs.mr import DmaBufMR

from transfer.backends.verbs.binding import PyverbsRDMAError
from transfer.memory.region import Region

DMA_BUF_HANDLE: Final = 1


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def device_address(region: Region) -> int | None:
    """Return the GPU virtual address of a region; None if it is host memory.

    Raises:
        PyverbsRDMAError: it is neither; a card cannot reach it.
    """
    if region.kind == "host":
        return None
    address = getattr(getattr(region, "storage", None), "address", None)
    if not region.kind.startswith("cuda:") or not isinstance(address, int):
        raise PyverbsRDMAError(f"memory of kind {region.kind} cannot be registered")
    return address


def await_queued_work(region: Region) -> None:
    """Wait for what the caller has queued on its current stream: the card does not."""
    if region.kind.startswith("cuda:"):
        torch.cuda.current_stream(torch.device(region.kind)).synchronize()


def register_device_memory(
    domain: Any, start: int, nbytes: int, rights: int
) -> tuple[DmaBufMR, int]:
    """Register GPU memory; `start` is a GPU virtual address.

    Returns:
        The memory region, and the address by which the card knows its first byte: the offset in
        the exported allocation.

    Raises:
        PyverbsRDMAError: the driver does not export it, or the card cannot map it.
    """
    base, size = _allocation(start)
    descriptor = ctypes.c_int(-1)
    _call("cuMemGetHandleForAddressRange", ctypes.byref(descriptor), ctypes.c_uint64(base),
          ctypes.c_size_t(size), DMA_BUF_HANDLE, ctypes.c_uint64(0))  # fmt: skip
    try:
        offset = start - base
        memory = DmaBufMR(domain, nbytes, rights, dmabuf=descriptor.value, offset=offset)
    finally:
        os.close(descriptor.value)  # the kernel keeps the memory as long as it is registered
    return memory, offset


def _allocation(start: int) -> tuple[int, int]:
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size),
          ctypes.c_uint64(start))  # fmt: skip
    return base.value, size.value


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    if driver is None:
        raise PyverbsRDMAError("no CUDA driver")
    code = getattr(driver, name)(*arguments)
    if code:
        raise PyverbsRDMAError(f"{name} failed with CUDA error {code}")
