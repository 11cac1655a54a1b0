"""A slab (a file on an SSD) in the place of a target: backend `file`."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from moe_runtime.bench.messages import Clocks, Compare, Compared, Done, Fill, Reply, Request
from moe_runtime.bench.usage import usage_now
from moe_runtime.bench.workload import Placement, differing_piece, fill
from transfer import Region
from transfer.backends.file import FileSlab
from transfer.pieces import IntsLike, make_pieces
from transfer.storage.storage import Waiter

DEADLINE_S: Final = 60.0


class SlabTransfer:
    """The handle of one operation on a slab."""

    backend: Final = "file"

    def __init__(self, waiter: Waiter) -> None:
        self.wait = waiter.wait


class SlabMover:
    """Writes and reads as an engine's, between our memory and a slab. Several may be in flight."""

    def __init__(self, slab: FileSlab) -> None:
        self._slab = slab

    def write(self, peer: str, source: Region, key: Any, source_offsets: IntsLike,
              target_offsets: IntsLike, lengths: IntsLike) -> SlabTransfer:  # fmt: skip
        """Write pieces into the slab."""
        deadline = time.monotonic() + DEADLINE_S
        waiter = Waiter(str(self._slab.path), "write", deadline)
        pieces = make_pieces(source_offsets, target_offsets, lengths)
        self._slab.store(source.array, pieces, deadline, waiter.end)
        return SlabTransfer(waiter)

    def read(self, peer: str, target: Region, key: Any, target_offsets: IntsLike,
             source_offsets: IntsLike, lengths: IntsLike) -> SlabTransfer:  # fmt: skip
        """Read pieces out of the slab."""
        deadline = time.monotonic() + DEADLINE_S
        waiter = Waiter(str(self._slab.path), "read", deadline)
        pieces = make_pieces(source_offsets, target_offsets, lengths)
        self._slab.fetch(target.array, pieces, deadline, waiter.end)
        return SlabTransfer(waiter)


class SlabRemote:
    """Answers for a slab; its processor time is this process's own."""

    in_process = True
    peer = "slab"

    def __init__(self, slab: FileSlab) -> None:
        self._slab = slab

    def ask(self, request: Request) -> Reply:
        """Fill or compare through the slab's own reads and writes."""
        if isinstance(request, Fill):
            offsets = np.frombuffer(request.offsets, dtype="<i8")
            scratch = np.empty(self._slab.nbytes, dtype=np.uint8)
            fill(scratch, offsets, request.size, request.seed)
            self._slab.write(torch.from_numpy(scratch), offsets, offsets, request.size)
            return Done()
        if isinstance(request, Compare):
            source = np.frombuffer(request.source, dtype="<i8")
            target = np.frombuffer(request.target, dtype="<i8")
            scratch = np.zeros(self._slab.nbytes, dtype=np.uint8)
            self._slab.read(torch.from_numpy(scratch), target, target, request.size)
            placement = Placement(source=source, target=target, size=request.size)
            piece = differing_piece(scratch, placement, request.seed)
            return Compared(-1 if piece is None else piece)
        return Clocks(usage_now())


def new_slab(folder: Path, nbytes: int) -> FileSlab:
    """A slab of a name of its own in a folder."""
    return FileSlab(folder / f"bench-{secrets.token_hex(8)}.slab", nbytes)
