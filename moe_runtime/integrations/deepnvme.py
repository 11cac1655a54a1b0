"""Slabs whose aligned bytes are moved by DeepSpeed's DeepNVMe handles (libaio).

    make_slab = slab_for(config.lent)           # None where DeepSpeed is not installed or not built
    StoreNode(engine, masters, config, secret=secret, make_slab=make_slab)

A handle aborts the process on a read past the end of a file, and does not tell why an operation
failed. So the file's size is looked at before every call, and what a handle does not do is done
again by the system calls of `FileSlab`, which say what is wrong. Handles copy through a buffer of
their own unless memory is pinned.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, Final, Protocol, Self

import torch

from configs.files import FileConfig
from configs.kvstore_segments import FileReader, SegmentConfig
from transfer.backends.file import FileSlab
from transfer.backends.file_work import ReadWork, WriteWork

logger = logging.getLogger(__name__)

QUEUE_DEPTH: Final = 32
DONE: Final = 1  # operations that one synchronous call completes


class Handle(Protocol):
    """The two calls of an `aio_handle` that are used. Not thread-safe."""

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int, /) -> int:
        """Fill the buffer; return how many operations were completed, -1 after a failure."""

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int, /) -> int:
        """Write the buffer; return as `sync_pread`."""


@functools.cache
def load_module() -> Any | None:
    """Return DeepSpeed's `async_io` extension, built if need be; None where that fails."""
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return AsyncIOBuilder().load()
    except (ImportError, OSError, RuntimeError, AttributeError, SubprocessError) as error:
        logger.warning("DeepNVMe is not to be had: %s: %s", type(error).__name__, error)
        return None


def deepnvme_slab() -> type[DeepNvmeSlab] | None:
    """Return what makes slabs with DeepNVMe; None where it is not to be had (the log says why)."""
    return None if load_module() is None else DeepNvmeSlab


def slab_for(segments: Iterable[SegmentConfig]) -> type[DeepNvmeSlab] | None:
    """Return `deepnvme_slab()` if one of a node's segments asks for it; else nothing is loaded."""
    wanted = any(segment.reader is FileReader.DEEPNVME for segment in segments)
    return deepnvme_slab() if wanted else None


class DeepNvmeSlab(FileSlab):
    """A `FileSlab` of which a handle per thread moves what is aligned.

    Args:
        path: As of `FileSlab`.
        nbytes: As of `FileSlab`.
        config: As of `FileSlab`; `io_bytes` is the handles' block size.
    """

    def __init__(
        self, path: str | os.PathLike[str], nbytes: int, config: FileConfig | None = None
    ) -> None:
        super().__init__(path, nbytes, config)
        self._handles: tuple[Handle, ...] = ()

    def open(self) -> Self:
        """As `FileSlab.open`. On a file without direct access it is no more than that."""
        super().open()
        module = load_module()
        if module is not None and self.alignment.direct:
            config = self._config
            self._handles = tuple(
                module.aio_handle(config.io_bytes, QUEUE_DEPTH, False, True, 1)
                for _ in range(config.threads)
            )
            self._read_work = functools.partial(_HandleRead, self._handles, Path(self.path))
            self._write_work = functools.partial(_HandleWrite, self._handles, Path(self.path))
        return self

    def close(self) -> None:
        """As `FileSlab.close`."""
        super().close()
        self._handles = ()
        self._read_work, self._write_work = ReadWork, WriteWork


class _HandleRead(ReadWork):
    by_calls = False

    def __init__(self, handles: tuple[Handle, ...], path: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._handles = handles
        self._name = str(path)

    def _fill(self, views: list[memoryview], low: int, lane: int) -> None:
        end = low + sum(view.nbytes for view in views)
        if len(views) == 1 and _reaches(self._access.fd, end):
            buffer = torch.frombuffer(views[0], dtype=torch.uint8)
            if self._handles[lane].sync_pread(buffer, self._name, low) == DONE:
                return
        super()._fill(views, low, lane)


class _HandleWrite(WriteWork):
    by_calls = False

    def __init__(self, handles: tuple[Handle, ...], path: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._handles = handles
        self._name = str(path)

    def _drain(self, views: list[memoryview], low: int, lane: int) -> None:
        if len(views) == 1 and not views[0].readonly:
            buffer = torch.frombuffer(views[0], dtype=torch.uint8)
            if self._handles[lane].sync_pwrite(buffer, self._name, low) == DONE:
                return
        super()._drain(views, low, lane)


def _reaches(fd: int, end: int) -> bool:
    return os.fstat(fd).st_size >= end
