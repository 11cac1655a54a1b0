"""What a store node lends, and how it looks after it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from configs.files import DirectIO, FileConfig, SyncPolicy
from configs.frozen import Frozen


class SegmentMedium(StrEnum):
    """`dram`; `ssd`, a file past the page cache; `cxl`, byte-addressable: a dax device or a file of
    a dax file system, mapped, or the memory of a NUMA node.
    """

    DRAM = "dram"
    CXL = "cxl"
    SSD = "ssd"


class FileReader(StrEnum):
    """`threads` call preadv and pwritev; `deepnvme` is DeepSpeed's, where it is installed."""

    THREADS = "threads"
    DEEPNVME = "deepnvme"


class SegmentConfig(Frozen):
    """One segment of a store node. A file keeps its blocks when the node restarts.

    Attributes:
        medium: What it lies in.
        bytes: Its size.
        path: Of the file (ssd), or of what is mapped (cxl).
        numa_node: Where its memory comes from (dram, cxl).
        hugepages: Whether its memory is in huge pages, where the machine has them.
        direct: What happens on a file system without O_DIRECT.
        sync: When bytes survive a power cut; see `SyncPolicy`.
        threads: System calls on the file under way at once.
        reader: What makes them.
    """

    medium: SegmentMedium = SegmentMedium.DRAM
    bytes: int = Field(64 << 20, ge=1 << 16)
    path: Path | None = None
    numa_node: int | None = Field(None, ge=0)
    hugepages: bool = True
    direct: DirectIO = DirectIO.PREFER
    sync: SyncPolicy = SyncPolicy.ON_REQUEST
    threads: int = Field(4, ge=1, le=64)
    reader: FileReader = FileReader.THREADS

    @property
    def file(self) -> FileConfig:
        """The knobs of its file."""
        return FileConfig(direct=self.direct, sync=self.sync, threads=self.threads)

    @model_validator(mode="after")
    def _says_where(self) -> Self:
        if self.medium is SegmentMedium.SSD and self.path is None:
            raise ValueError("an ssd segment needs a path")
        if self.medium is SegmentMedium.CXL and (self.path is None) == (self.numa_node is None):
            raise ValueError("a cxl segment needs either a path or a numa_node")
        if self.medium is SegmentMedium.DRAM and self.path is not None:
            raise ValueError("a dram segment has no path")
        return self


class ScrubConfig(Frozen):
    """The thread that reads every block of a node again and again, and verifies it."""

    enabled: bool = Field(True, description="Look for blocks whose bytes have changed.")
    period_s: float = Field(
        86_400.0, gt=0, description="Within which every block is read once, if the next allows it."
    )
    bytes_per_s: int = Field(64 << 20, ge=1, description="Most bytes that it reads in a second.")
