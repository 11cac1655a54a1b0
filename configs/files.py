"""Files that are read and written past the page cache."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from configs.frozen import Frozen


class DirectIO(StrEnum):
    """`require` refuses a file system without O_DIRECT, `prefer` goes through the page cache there
    and says so, `off` always goes through it.
    """

    REQUIRE = "require"
    PREFER = "prefer"
    OFF = "off"


class SyncPolicy(StrEnum):
    """When bytes of a slab survive a power cut: `on_request` after `sync()`, `each_write` when the
    write has ended. A killed process loses no ended write with either.
    """

    ON_REQUEST = "on_request"
    EACH_WRITE = "each_write"


class FileConfig(Frozen):
    """A slab: a preallocated file whose blocks are read and written past the page cache."""

    direct: DirectIO = DirectIO.PREFER
    sync: SyncPolicy = SyncPolicy.ON_REQUEST
    threads: int = Field(4, ge=1, le=64, description="System calls under way at once.")
    queued_max: int = Field(
        256, ge=1, description="Operations that wait or run; further ones wait for room."
    )
    io_bytes: int = Field(
        1 << 20,
        ge=1 << 16,
        multiple_of=1 << 16,
        description="Largest system call; up to four that need no buffer and lie behind one "
        "another in the file are one.",
    )
    operation_timeout_s: float = Field(30.0, gt=0, description="Deadline that no call names.")
